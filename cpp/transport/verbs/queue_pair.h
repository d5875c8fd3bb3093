#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "transport/verbs/device.h"
#include "transport/verbs/endpoint.h"

namespace moolink::transport::verbs {

// What has come back from the device.
struct Completion {
  bool received = false;        // a SEND of the peer; else requests of this side have ended
  std::uint64_t id = 0;         // received: the slot; else the last request that has ended
  std::size_t bytes = 0;        // received
  std::uint32_t taken = 0;      // received: how many SENDs the peer has taken so far
  const char* error = nullptr;  // in the device's words; null: it succeeded
};

// A reliable connection to one queue pair elsewhere, with a queue of completions of its own.
// Requests are numbered from 1 and end in order.
class QueuePair {
 public:
  // Throws Exception{error} with the reason.
  QueuePair(std::shared_ptr<Device> device, void* owner);
  ~QueuePair() { destroy(); }
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  Endpoint endpoint() const;
  // Ready to receive and to send. Throws Exception{wire} if the other end cannot be one,
  // Exception{error} if the system refuses.
  void connect(const Endpoint& there);

  std::size_t room() const { return destroyed() ? 0 : kRequests - (posted_ - ended_); }
  bool idle() const { return posted_ == ended_; }
  std::size_t inline_bytes() const { return inline_bytes_; }
  std::uint32_t number() const { return pair_->qp_num; }
  const ibv_qp* handle() const { return pair_; }

  // Each returns the number of the request and throws Exception{error} if the device refuses it.
  // key: none: the bytes are copied into the request.
  std::uint64_t send(std::span<const std::byte> bytes, std::optional<std::uint32_t> key,
                     std::uint32_t taken, bool tell);
  std::uint64_t write(std::span<const std::byte> bytes, std::uint32_t key, std::uint64_t address,
                      std::uint32_t remote_key);

  // The next one, if there is any.
  std::optional<Completion> poll();
  // The device is to ring the descriptor with the next completion; false: there is one already.
  bool arm();
  void rung() { armed_ = false; }

  // From now on nothing leaves, and nothing that arrives is taken. What was posted comes back.
  void stop();
  // The same, at once: nothing touches its memory any more.
  void destroy();
  bool destroyed() const { return pair_ == nullptr; }

  static constexpr std::size_t kRequests = 128;

 private:
  void make_pair();
  void initialise();
  std::uint64_t post(ibv_send_wr& request);
  bool fetch();

  std::shared_ptr<Device> device_;
  const Library& library_;
  ibv_cq* completions_ = nullptr;
  ibv_qp* pair_ = nullptr;
  std::size_t inline_bytes_ = 0;
  std::uint32_t first_packet_;
  std::uint64_t posted_ = 0;
  std::uint64_t ended_ = 0;
  bool armed_ = false;
  bool stopped_ = false;

  static constexpr int kFetched = 16;
  std::array<ibv_wc, kFetched> fetched_;
  int fetched_at_ = 0;
  int fetched_end_ = 0;
};

}  // namespace moolink::transport::verbs
