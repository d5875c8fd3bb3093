#pragma once

#include <algorithm>

#include "base/time.h"

namespace moolink::runtime {

// Whether it is worth looking again for a moment before sleeping: what comes within the moment
// saves a sleep and a wake-up, which cost more; a moment in vain costs a processor that others may
// need. After each one in vain the pause before the next one is twice as long, until moments in
// vain take a hundredth of the time. It is time that is counted, not opportunities: where all sleep
// because all others do, opportunities come slowly, and only looking leads out of it.
class Patience {
 public:
  // A sleep and a wake-up take as long, on a virtual machine whose other processor has halted.
  static constexpr Duration kMoment = microseconds(200);

  bool is_worth_it(Time now) const { return now >= resting_until_; }

  // After this of a moment the processor is offered to others: who is waited for may need this very
  // one, as systems often put the two on one, and looking all the time keeps it out. Not at once
  // where somebody else would take it for long.
  Duration alone() const { return offers_at_once_ ? Duration::zero() : kAlone; }

  // A moment has ended: it was found worth it, or not. `offered`: others could have the processor.
  void found(bool something, bool offered, Time begin, Time end) {
    if (something) {
      in_vain_ = 0;
      offers_at_once_ |= offered;
      return;
    }
    if (end - begin > 2 * kMoment) offers_at_once_ = false;
    resting_until_ = end + in_vain_ * (end - begin);
    in_vain_ = std::min(std::max(1, 2 * in_vain_), kMost);
  }

 private:
  static constexpr Duration kAlone = microseconds(40);
  static constexpr int kMost = 100;
  int in_vain_ = 0;  // the next pause, in moments
  bool offers_at_once_ = false;
  Time resting_until_{};
};

}  // namespace moolink::runtime
