#include "collective/name_counts.h"

#include <string>

#include "check.h"
#include "members.h"

namespace moolink::collective {
namespace name_counts_test {

TEST("name counts: each name has numbers of its own, and the latest are remembered") {
  NameCounts counts(3);
  CHECK_EQ(counts.start("a"), std::uint64_t{0});
  CHECK_EQ(counts.start("a"), std::uint64_t{1});
  CHECK_EQ(counts.start("b"), std::uint64_t{0});
  CHECK_EQ(counts.start("c"), std::uint64_t{0});
  CHECK_EQ(counts.start("a"), std::uint64_t{2});
  CHECK_EQ(counts.start("d"), std::uint64_t{0});  // "b" is forgotten
  CHECK_EQ(counts.started("b"), std::uint64_t{0});
  CHECK_EQ(counts.started("c"), std::uint64_t{1});
  CHECK_EQ(counts.started("a"), std::uint64_t{3});
  CHECK_EQ(counts.size(), std::size_t{3});
  counts.clear();
  CHECK_EQ(counts.start("a"), std::uint64_t{0});
}

TEST("name counts: names that count do not make a member grow, and old ones can be used again") {
  Members members(2);
  const std::size_t names = NameCounts::kMost + 1000;
  for (std::size_t n = 0; n < names; ++n) {
    const std::string name = "stats " + std::to_string(n % (NameCounts::kMost + 500));
    const OpId a = members.start(0, name, floats(1), {buffer<float>({1})});
    const OpId b = members.start(1, name, floats(1), {buffer<float>({2})});
    members.settle();
    CHECK(members.done(0, a) != nullptr && members.done(1, b) != nullptr);
    if (members.done(0, a) == nullptr) return;
  }
}

}  // namespace name_counts_test
}  // namespace moolink::collective
