#pragma once

#include <algorithm>

#include "base/time.h"

namespace moolink::runtime {

// Adaptive spinning: decides whether a thread polls for a moment before it sleeps. An event within
// that moment saves a sleep and a wake-up, which cost more; a spin in vain costs a processor that
// others may need. After each spin in vain the pause before the next one doubles, until spins in
// vain take a hundredth of the time. The pause is measured in time, not in opportunities: where
// every process sleeps because the others do, opportunities are rare, and only polling ends that.
class SpinPolicy {
 public:
  // As long as a sleep and a wake-up, on a virtual machine whose other processor has halted.
  static constexpr Duration kSpin = microseconds(200);

  bool should_spin(Time now) const { return now >= resting_until_; }

  // How long to spin before yielding the processor: the awaited thread may need this processor,
  // because schedulers often put both on one. A spin does not yield at once where another process
  // would keep the processor for long.
  Duration yield_after() const { return yields_at_once_ ? Duration::zero() : kYieldAfter; }

  // A spin has ended, with an event or in vain. `yielded`: others could use the processor.
  void spun(bool something, bool yielded, Time begin, Time end) {
    if (something) {
      in_vain_ = 0;
      yields_at_once_ |= yielded;
      return;
    }
    if (end - begin > 2 * kSpin) yields_at_once_ = false;
    resting_until_ = end + in_vain_ * (end - begin);
    in_vain_ = std::min(std::max(1, 2 * in_vain_), kMost);
  }

 private:
  static constexpr Duration kYieldAfter = microseconds(40);
  static constexpr int kMost = 100;
  int in_vain_ = 0;  // the next pause, in spins
  bool yields_at_once_ = false;
  Time resting_until_{};
};

}  // namespace moolink::runtime
