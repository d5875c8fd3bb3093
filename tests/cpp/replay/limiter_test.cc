#include "replay/limiter.h"

#include "check.h"

using moolink::replay::Limiter;

// What the numbers are is Reverb's: inserts * samples_per_insert - samples within the two bounds.
TEST("a ratio of samples to inserts holds within its error") {
  // samples_per_insert 2, min_size 3, error_buffer 4: the error without offset is 6 +- 4.
  Limiter limiter({2, 3, 2, 10});
  for (int i = 0; i < 5; ++i) {
    CHECK(limiter.can_insert());
    CHECK_EQ(limiter.samples_allowed(100), i < 3 ? 0 : 2 * i - 2);
    limiter.inserted();
  }
  CHECK(!limiter.can_insert());  // 6 * 2 > 10
  CHECK_EQ(limiter.samples_allowed(100), 8);
  CHECK_EQ(limiter.samples_allowed(5), 5);
  limiter.sampled(2);
  CHECK(limiter.can_insert());
  limiter.sampled(6);
  CHECK_EQ(limiter.samples_allowed(100), 0);
}

TEST("below min_size inserts are free and samples wait, also when items have gone") {
  Limiter limiter({1, 2, 1, 3});
  limiter.inserted();
  limiter.inserted();
  limiter.inserted();
  CHECK(!limiter.can_insert());
  CHECK_EQ(limiter.samples_allowed(1), 1);
  limiter.deleted();
  limiter.deleted();
  CHECK_EQ(limiter.samples_allowed(1), 0);
  CHECK(limiter.can_insert());
}

TEST("without a ratio only min_size counts") {
  Limiter limiter({});
  CHECK_EQ(limiter.samples_allowed(7), 0);
  limiter.inserted();
  CHECK_EQ(limiter.samples_allowed(1'000'000), 1'000'000);
  limiter.sampled(1'000'000'000);
  CHECK_EQ(limiter.samples_allowed(5), 5);
  CHECK(limiter.can_insert());
}

TEST("a queue has at most its size of items that were not sampled") {
  Limiter limiter({1, 1, 0, 2});
  limiter.inserted();
  limiter.inserted();
  CHECK(!limiter.can_insert());
  CHECK_EQ(limiter.samples_allowed(9), 2);
  limiter.sampled(1);
  limiter.deleted();
  CHECK(limiter.can_insert());
}
