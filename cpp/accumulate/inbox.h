#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "accumulate/messages.h"
#include "base/time.h"

namespace moolink::accumulate {

struct Inbound {
  Uid from;
  Envelope envelope;
  std::vector<Buffer> parts;
  std::size_t bytes = 0;  // as received; 0: of this peer itself
};

// What the handlers of a message get beside it: its time, its sender and its payload's parts.
struct Arrival {
  Time now;
  const Uid& from;
  const std::vector<Buffer>& parts;
};

// The messages that wait inside a Machine: those of this peer to itself, and early ones, which came
// before their epoch or phase. An early one is looked at again, before all others, in each epoch
// and phase that is entered. Early messages are bounded by number and bytes; more than that means a
// faulty peer, and they are dropped.
class Inbox {
 public:
  explicit Inbox(std::size_t most_bytes) : most_bytes_(most_bytes) {}

  void push(Inbound own) { queue_.push_back(std::move(own)); }
  void keep_early(Inbound inbound);
  // The epoch or the phase is another one. Drops early messages of older epochs.
  void replay_early(std::uint64_t epoch);

  bool empty() const { return queue_.empty(); }
  Inbound pop();

 private:
  std::size_t most_bytes_;
  std::deque<Inbound> queue_;
  std::vector<Inbound> early_;
  std::size_t early_bytes_ = 0;
};

}  // namespace moolink::accumulate
