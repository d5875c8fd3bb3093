#include "collective/plan.h"

#include "check.h"

namespace {

using moolink::collective::kSmallBytes;
using moolink::collective::Range;
using moolink::collective::slices;

TEST("slices cover every element once, in order") {
  for (const std::size_t item : {1u, 2u, 4u, 8u, 16u}) {
    for (std::size_t owners = 1; owners <= 9; ++owners) {
      for (const std::uint64_t count : {0u, 1u, 63u, 64u, 1000u, 4097u, 65536u, 1000003u}) {
        std::uint64_t at = 0;
        for (const Range& range : slices(count, item, owners)) {
          CHECK_EQ(range.begin, at);
          CHECK(range.end >= range.begin);
          at = range.end;
        }
        CHECK_EQ(at, count);
      }
    }
  }
}

TEST("a small tensor has one owner, a large one is shared evenly at cache lines") {
  const auto small = slices(kSmallBytes / 4, 4, 3);
  CHECK_EQ(small[0].count(), kSmallBytes / 4);
  CHECK(small[1].empty() && small[2].empty());
  const auto large = slices(1000000, 4, 3);
  for (const Range& range : large) {
    CHECK_EQ(range.begin % 16, std::uint64_t{0});
    CHECK(range.count() > 333000 && range.count() < 333400);
  }
}

}  // namespace
