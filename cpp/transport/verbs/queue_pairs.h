#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "transport/verbs/device.h"
#include "transport/verbs/endpoint.h"
#include "transport/verbs/queue_pair.h"

namespace moolink::transport::verbs {

// A completion from the device.
struct Completion {
  std::size_t pair = 0;         // its queue pair
  bool received = false;        // a SEND of the peer; else requests of this side have ended
  std::uint64_t id = 0;         // received: the slot; else the last request that has ended
  std::size_t bytes = 0;        // received
  std::uint32_t immediate = 0;  // received: sent with it
  const char* error = nullptr;  // the device's text; null: it succeeded
};

// The queue pairs of one connection, with one queue of completions. The first carries the stream of
// frames; large parts are spread over the others.
class QueuePairs {
 public:
  // Throws Exception{error} with the reason.
  QueuePairs(std::shared_ptr<Device> device, std::size_t count, void* owner);
  ~QueuePairs() { destroy(); }
  QueuePairs(const QueuePairs&) = delete;
  QueuePairs& operator=(const QueuePairs&) = delete;

  Endpoint endpoint() const;
  // Connects each to the other side's pair of the same index, as many as both have. Throws
  // Exception{wire} for an impossible other side, Exception{error} if they cannot be connected.
  void connect(const Endpoint& there);

  std::size_t size() const { return pairs_.size(); }
  QueuePair& at(std::size_t index) { return *pairs_[index]; }
  QueuePair& first() { return *pairs_.front(); }
  bool idle() const;
  bool include(const ibv_qp* pair) const;

  // The next completion, if any.
  std::optional<Completion> poll();
  // Makes the device ring the descriptor with the next completion; false: there is one already.
  bool arm();
  void rung() { armed_ = false; }

  // Does it for each queue pair.
  void stop();
  void destroy();

  static constexpr int kMost = 8;

 private:
  bool fetch();
  std::size_t index_of(std::uint32_t number) const;

  std::shared_ptr<Device> device_;
  const Library& library_;
  ibv_cq* completions_ = nullptr;
  std::vector<std::unique_ptr<QueuePair>> pairs_;
  bool armed_ = false;

  static constexpr int kFetched = 16;
  std::array<ibv_wc, kFetched> fetched_;
  int fetched_at_ = 0;
  int fetched_end_ = 0;
};

}  // namespace moolink::transport::verbs
