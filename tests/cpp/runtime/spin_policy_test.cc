#include "runtime/engine/spin_policy.h"

#include "check.h"

namespace moolink::runtime {

TEST(
    "spin policy: each moment in vain doubles the pause, until they take a hundredth of the time") {
  SpinPolicy policy;
  Time now{};
  // The pause after a moment of 200 µs, in such moments.
  const auto pause_after = [&](bool found) {
    const Time begin = now;
    now += microseconds(200);
    policy.spun(found, false, begin, now);
    const Time end = now;
    while (!policy.should_spin(now)) now += microseconds(200);
    return (now - end) / microseconds(200);
  };
  CHECK(policy.should_spin(now));
  for (const int expected : {0, 1, 2, 4, 8, 16, 32, 64, 100, 100}) {
    CHECK_EQ(pause_after(false), expected);
  }
  CHECK_EQ(pause_after(true), 0);
  CHECK_EQ(pause_after(true), 0);
  CHECK_EQ(pause_after(false), 0);
  CHECK_EQ(pause_after(false), 1);
}

TEST(
    "spin policy: a moment that others made long, on this processor, is followed by a long pause") {
  SpinPolicy policy;
  const Time begin{};
  policy.spun(false, true, begin, begin);
  const Time end = begin + milliseconds(3);
  policy.spun(false, true, begin, end);
  CHECK(!policy.should_spin(end + milliseconds(3) - microseconds(1)));
  CHECK(policy.should_spin(end + milliseconds(3)));
}

TEST(
    "spin policy: where offering the processor helped it is offered at once, until others keep "
    "it") {
  SpinPolicy policy;
  const Time begin{};
  const Duration careful = policy.yield_after();
  CHECK(careful > Duration::zero());
  policy.spun(true, false, begin, begin + microseconds(10));
  policy.spun(false, true, begin, begin + SpinPolicy::kSpin);
  CHECK_EQ(policy.yield_after().count(), careful.count());
  policy.spun(true, true, begin, begin + microseconds(60));
  CHECK_EQ(policy.yield_after().count(), 0);
  policy.spun(false, true, begin, begin + SpinPolicy::kSpin);
  CHECK_EQ(policy.yield_after().count(), 0);
  policy.spun(false, true, begin, begin + milliseconds(3));
  CHECK_EQ(policy.yield_after().count(), careful.count());
}

}  // namespace moolink::runtime
