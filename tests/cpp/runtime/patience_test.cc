#include "runtime/patience.h"

#include "check.h"

namespace moolink::runtime {

TEST("patience: each moment in vain halves how often there is one, one that is not restores it") {
  Patience patience;
  const auto passed_over = [&] {
    int count = 0;
    while (!patience.is_worth_it()) ++count;
    return count;
  };
  for (const int expected : {0, 1, 3, 7, 15}) {
    CHECK_EQ(passed_over(), expected);
    patience.found(false);
  }
  CHECK_EQ(passed_over(), 31);
  patience.found(true);
  CHECK_EQ(passed_over(), 0);
  patience.found(true);
  CHECK(patience.is_worth_it());
  for (int i = 0; i < 50; ++i) patience.found(false);
  CHECK_EQ(passed_over(), 1023);
}

}  // namespace moolink::runtime
