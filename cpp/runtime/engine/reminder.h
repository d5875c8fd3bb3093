#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/time.h"

namespace moolink::runtime {

// When to say what is waited for: after some seconds, and again after ever longer pauses, so that
// neither a wait goes unexplained nor the log fills with one that lasts.
class Reminder {
 public:
  // The next time at which a wait since `since` is due.
  Time next(Time since) const {
    const Time first = since + kPauses.front();
    if (times_ == 0 || since > said_at_ + kCalm) return first;
    return std::max(first, said_at_ + kPauses[std::min(times_, kPauses.size() - 1)]);
  }
  // Whether to say it now; if so, it counts as said.
  bool due(Time since, Time now) {
    if (now < next(since)) return false;
    times_ = since > said_at_ + kCalm ? 1 : times_ + 1;
    said_at_ = now;
    return true;
  }

 private:
  static constexpr std::array<Duration, 5> kPauses = {seconds(3), seconds(10), seconds(30),
                                                      seconds(100), seconds(300)};
  static constexpr Duration kCalm = seconds(100);  // without a wait that was said: all is forgotten

  std::size_t times_ = 0;
  Time said_at_{};
};

}  // namespace moolink::runtime
