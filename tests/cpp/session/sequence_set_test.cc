#include "session/sequence_set.h"

#include <set>

#include "base/random.h"
#include "check.h"

namespace moolink::session {

TEST("a sequence set agrees with a plain set") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    SequenceSet set;
    std::set<std::uint64_t> plain;
    for (int i = 0; i < 300; ++i) {
      const std::uint64_t seq = set.cum() + 1 + random.below(1 + random.below(200));
      CHECK_EQ(set.insert(seq), plain.insert(seq).second);
    }
    std::uint64_t cum = 0;
    while (plain.contains(cum + 1)) ++cum;
    CHECK_EQ(set.cum(), cum);
    CHECK_EQ(set.has_gaps(), *plain.rbegin() > cum);
    const std::vector<std::uint64_t> bits = set.bitmap();
    CHECK(bits.empty() || bits.back() != 0);
    for (std::uint64_t seq = 1; seq <= *plain.rbegin() + 70; ++seq) {
      CHECK_EQ(set.contains(seq), plain.contains(seq));
      if (seq <= cum) continue;
      const std::uint64_t i = seq - cum - 1;
      const bool in_bits = i / 64 < bits.size() && ((bits[i / 64] >> (i % 64)) & 1) != 0;
      CHECK_EQ(in_bits, plain.contains(seq));
    }
  }
}

}  // namespace moolink::session
