#include "runtime/engine/patience.h"

#include "check.h"

namespace moolink::runtime {

TEST("patience: each moment in vain doubles the pause, until they take a hundredth of the time") {
  Patience patience;
  Time now{};
  // The pause after a moment of 200 µs, in such moments.
  const auto pause_after = [&](bool found) {
    const Time begin = now;
    now += microseconds(200);
    patience.found(found, false, begin, now);
    const Time end = now;
    while (!patience.is_worth_it(now)) now += microseconds(200);
    return (now - end) / microseconds(200);
  };
  CHECK(patience.is_worth_it(now));
  for (const int expected : {0, 1, 2, 4, 8, 16, 32, 64, 100, 100}) {
    CHECK_EQ(pause_after(false), expected);
  }
  CHECK_EQ(pause_after(true), 0);
  CHECK_EQ(pause_after(true), 0);
  CHECK_EQ(pause_after(false), 0);
  CHECK_EQ(pause_after(false), 1);
}

TEST("patience: a moment that others made long, on this processor, is followed by a long pause") {
  Patience patience;
  const Time begin{};
  patience.found(false, true, begin, begin);
  const Time end = begin + milliseconds(3);
  patience.found(false, true, begin, end);
  CHECK(!patience.is_worth_it(end + milliseconds(3) - microseconds(1)));
  CHECK(patience.is_worth_it(end + milliseconds(3)));
}

TEST("patience: where offering the processor helped it is offered at once, until others keep it") {
  Patience patience;
  const Time begin{};
  const Duration careful = patience.alone();
  CHECK(careful > Duration::zero());
  patience.found(true, false, begin, begin + microseconds(10));
  patience.found(false, true, begin, begin + Patience::kMoment);
  CHECK_EQ(patience.alone().count(), careful.count());
  patience.found(true, true, begin, begin + microseconds(60));
  CHECK_EQ(patience.alone().count(), 0);
  patience.found(false, true, begin, begin + Patience::kMoment);
  CHECK_EQ(patience.alone().count(), 0);
  patience.found(false, true, begin, begin + milliseconds(3));
  CHECK_EQ(patience.alone().count(), careful.count());
}

}  // namespace moolink::runtime
