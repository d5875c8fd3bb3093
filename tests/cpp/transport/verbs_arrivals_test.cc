// The order of reading across queue pairs, without any device.

#include "transport/verbs/arrivals.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "check.h"
#include "transport/verbs/packets.h"

namespace moolink::transport::verbs {
namespace verbs_arrivals_test {

std::array<std::byte, 1> byte(int value) { return {static_cast<std::byte>(value)}; }

// The first bytes of all that can be read now, in order.
std::string read_all(Arrivals& arrivals) {
  std::string read;
  while (const auto bytes = arrivals.next()) read += static_cast<char>(bytes->at(0));
  return read;
}

TEST("verbs: what names marks that have not come is read after them, and in order") {
  Arrivals arrivals;
  CHECK(arrivals.may_read(0));
  CHECK(!arrivals.may_read(1));
  arrivals.hold(1, byte('a'));
  arrivals.hold(3, byte('b'));
  arrivals.hold(3, byte('c'));
  CHECK(!arrivals.may_read(0));  // what was held comes first
  CHECK_EQ(read_all(arrivals), "");
  arrivals.marked();
  CHECK_EQ(read_all(arrivals), "a");
  arrivals.marked();
  CHECK_EQ(read_all(arrivals), "");
  arrivals.marked();
  CHECK_EQ(read_all(arrivals), "bc");
  CHECK(arrivals.may_read(3));
  CHECK(!arrivals.may_read(4));
}

TEST("verbs: marks are counted on when their number wraps around") {
  Arrivals arrivals;
  for (int i = 0; i < 0xffff; ++i) arrivals.marked();
  CHECK(arrivals.may_read(0xffff));
  CHECK(!arrivals.may_read(0));
  arrivals.hold(0, byte('a'));
  arrivals.hold(1, byte('b'));
  arrivals.marked();
  CHECK_EQ(read_all(arrivals), "a");
  arrivals.marked();
  CHECK_EQ(read_all(arrivals), "b");
}

TEST("verbs: both numbers that go with a SEND come back from its 32 bits") {
  const Immediate sent{0xfffe, 0x0102};
  const Immediate got = Immediate::of(sent.bits());
  CHECK_EQ(got.taken, sent.taken);
  CHECK_EQ(got.marks, sent.marks);
}

}  // namespace verbs_arrivals_test
}  // namespace moolink::transport::verbs
