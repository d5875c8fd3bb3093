#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/time.h"
#include "base/uid.h"

namespace moolink::rpc {

// The queue of timers. A timer is never removed: its owner knows whether it still counts, and the
// queue is swept when most do not.
struct Timer {
  enum class Kind : std::uint8_t { call, handler, session, greeting, dial, search, close };

  Time at;
  Kind kind;
  std::uint64_t id = 0;  // call, connection, search, ...
  Uid instance;          // session, handler: of the peer

  // Ties are in a fixed order, so that runs are repeatable.
  auto operator<=>(const Timer&) const = default;
};

class TimerQueue {
 public:
  bool empty() const { return heap_.empty(); }
  Time next() const { return heap_.empty() ? kNever : heap_.front().at; }
  const Timer& top() const { return heap_.front(); }

  void push(const Timer& timer) {
    if (timer.at == kNever) return;
    heap_.push_back(timer);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }
  void pop() {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    heap_.pop_back();
  }
  // A timer in the queue no longer counts.
  void forget() { ++forgotten_; }
  bool needs_sweep() const { return forgotten_ >= kSweep && forgotten_ * 2 >= heap_.size(); }
  // Removes all but those for which counts(timer) is true.
  template <class Counts>
  void sweep(Counts counts) {
    forgotten_ = 0;
    std::erase_if(heap_, [&](const Timer& timer) { return !counts(timer); });
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

 private:
  static constexpr std::size_t kSweep = 1024;

  std::vector<Timer> heap_;  // the earliest on top
  std::size_t forgotten_ = 0;
};

}  // namespace moolink::rpc
