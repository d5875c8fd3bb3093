#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/time.h"

namespace moolink::runtime {

// When to log a wait: after some seconds, and again after ever longer pauses, so that no wait goes
// unexplained and a lasting one does not fill the log.
class Reminder {
 public:
  // When a wait since `since` is due next.
  Time next(Time since) const {
    const Time first = since + kPauses.front();
    if (times_ == 0 || since > said_at_ + kCalm) return first;
    return std::max(first, said_at_ + kPauses[std::min(times_, kPauses.size() - 1)]);
  }
  // Whether to log it now; if so, it counts as logged.
  bool due(Time since, Time now) {
    if (now < next(since)) return false;
    times_ = since > said_at_ + kCalm ? 1 : times_ + 1;
    said_at_ = now;
    return true;
  }

 private:
  static constexpr std::array<Duration, 5> kPauses = {seconds(3), seconds(10), seconds(30),
                                                      seconds(100), seconds(300)};
  static constexpr Duration kCalm = seconds(100);  // without a logged wait: starts over

  std::size_t times_ = 0;
  Time said_at_{};
};

}  // namespace moolink::runtime
