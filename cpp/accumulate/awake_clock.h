#pragma once

#include <algorithm>

#include "base/time.h"

namespace moolink::accumulate {

// A clock that stops while no event comes, so that the time in which this process was suspended is
// held against no other peer: a process that was stopped finds their answers in its sockets only
// after it notices how late it is. The Machine advances it at each event, at least once an interval
// while it waits for another peer; the timeouts of other peers are by this clock.
class AwakeClock {
 public:
  void advance(Time now) {
    if (last_event_ != kNever) time_ += std::min(now - last_event_, kInterval);
    last_event_ = now;
  }

  Time now() const { return time_; }
  // When it has to be advanced at the latest, in the time of the events.
  Time next_event() const { return last_event_ + kInterval; }

 private:
  static constexpr Duration kInterval = milliseconds(250);

  Time time_{};
  Time last_event_ = kNever;
};

}  // namespace moolink::accumulate
