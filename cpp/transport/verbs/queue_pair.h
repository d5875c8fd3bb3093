#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "transport/verbs/device.h"
#include "transport/verbs/endpoint.h"

namespace moolink::transport::verbs {

// A reliable connection to one remote queue pair. Requests are numbered from 1 and end in order.
class QueuePair {
 public:
  // Its completions go into the queue. Throws Exception{error} with the reason.
  QueuePair(const Device& device, ibv_cq* completions);
  ~QueuePair() { destroy(); }
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  Endpoint::Pair end() const { return {number(), first_packet_}; }
  // Makes it ready to receive and to send, to one of the other side's. Throws Exception{error} if
  // the system refuses.
  void connect(const Endpoint& there, const Endpoint::Pair& pair);

  std::size_t room() const { return pair_ == nullptr ? 0 : kRequests - (posted_ - ended_); }
  bool idle() const { return posted_ == ended_; }
  std::size_t inline_bytes() const { return inline_bytes_; }
  std::uint32_t number() const { return pair_->qp_num; }
  const ibv_qp* handle() const { return pair_; }

  // Each returns the number of the request and throws Exception{error} if the device refuses it.
  // key: none: the bytes are copied into the request. immediate: sent with them. tell: the device
  // reports its end, and with it that of all before it.
  std::uint64_t send(std::span<const std::byte> bytes, std::optional<std::uint32_t> key,
                     std::uint32_t immediate, bool tell);
  std::uint64_t write(std::span<const std::byte> bytes, std::uint32_t key, std::uint64_t address,
                      std::uint32_t remote_key);
  // Requests up to this one have ended.
  void ended(std::uint64_t request);

  // Marks the number of a request; the number of a filled slot lacks it.
  static constexpr std::uint64_t kRequest = std::uint64_t{1} << 63;

  // From now on nothing leaves, and nothing that arrives is taken. Posted requests come back.
  void stop();
  // The same, at once: its memory is not accessed any more.
  void destroy();

  static constexpr std::size_t kRequests = 128;

 private:
  void make_pair(ibv_cq* completions);
  void initialise();
  std::uint64_t post(ibv_send_wr& request);

  const Device& device_;
  const Library& library_;
  ibv_qp* pair_ = nullptr;
  std::size_t inline_bytes_ = 0;
  std::uint32_t first_packet_;
  std::uint64_t posted_ = 0;
  std::uint64_t ended_ = 0;
  bool stopped_ = false;
};

}  // namespace moolink::transport::verbs
