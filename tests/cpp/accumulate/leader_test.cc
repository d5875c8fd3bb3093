#include "accumulate/leader.h"

#include <limits>

#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

const Uid kA{1, 1};
const Uid kB{1, 2};
const Uid kC{1, 3};

Leader make_leader(std::uint32_t parallel = 1) {
  Leader::Config config;
  config.epoch = 4;
  config.round = 10;
  config.parallel_gradients = parallel;
  config.snapshot_gather = milliseconds(100);
  Leader leader(config, {{kA, {"a", false, true, false}},
                         {kB, {"b", false, true, false}},
                         {kC, {"c", true, false, true}}});
  leader.have(kA, {10, 10, true});
  leader.have(kB, {10, 10, true});
  return leader;
}

TEST("leader: a round is the shortest prefix of the offers that reaches the virtual batch") {
  Leader leader = make_leader();
  leader.offer(kA, {1, 3, {{"steps", 30}}});
  CHECK(!leader.cut(8));
  leader.offer(kB, {1, 0, {{"steps", 1}}});
  leader.offer(kB, {2, 6, {{"steps", 60}}});
  leader.offer(kA, {2, 3, {}});
  const auto round = leader.cut(8);
  CHECK(round.has_value());
  CHECK_EQ(round->round, std::uint64_t{11});
  CHECK_EQ(round->total, std::int64_t{9});
  CHECK_EQ(round->contributions.size(), std::size_t{3});
  CHECK(round->counters.at("steps") == (CounterSum{0, 91}));
  CHECK_EQ(leader.queued().size(), std::size_t{1});
}

TEST("leader: a sum of counters does not wrap around where 64 bits do") {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  Leader leader = make_leader();
  leader.offer(kA, {1, 0, {{"up", kMost}, {"down", kLeast}, {"back", kMost}, {"few", -3}}});
  leader.offer(kB, {1, 0, {{"up", kMost}, {"down", kLeast}, {"back", kLeast}, {"few", 1}}});
  leader.offer(kA, {2, 8, {{"up", 2}, {"down", -1}, {"back", 1}}});
  const auto round = leader.cut(8);
  CHECK(round.has_value());
  CHECK(round->counters.at("up") == (CounterSum{1, 0}));                     // 2^64
  CHECK(round->counters.at("down") == (CounterSum{-2, ~std::uint64_t{0}}));  // -2^64 - 1
  CHECK(round->counters.at("back") == (CounterSum{0, 0}));
  CHECK(round->counters.at("few") == (CounterSum{-1, ~std::uint64_t{0} - 1}));  // -2
  CHECK(!round->counters.at("up").fits_64_bits() && !round->counters.at("down").fits_64_bits());
  CHECK(round->counters.at("back").fits_64_bits() && round->counters.at("few").fits_64_bits());
}

TEST("leader: the same contribution is not queued twice, an observer's not at all") {
  Leader leader = make_leader();
  leader.offer(kA, {1, 4, {}});
  leader.offer(kA, {1, 4, {}});
  leader.offer(kC, {1, 4, {}});
  leader.offer(Uid{9, 9}, {1, 4, {}});
  CHECK_EQ(leader.queued().size(), std::size_t{1});
}

TEST("leader: a member's queue has limits, which are nobody else's and end with its rounds") {
  Leader leader = make_leader();
  Counters many;
  for (int i = 0; i < 257; ++i) many["c" + std::to_string(i)] = 1;
  leader.offer(kA, {1, 1, many});
  leader.offer(kA, {2, 1, {{std::string(257, 'x'), 1}}});
  CHECK(leader.queued().empty());
  const Counters largest{{std::string(256, 'x'), 1}};
  for (std::uint64_t k = 1; k <= 100'000; ++k) leader.offer(kA, {k, 0, largest});
  const std::size_t queued = leader.queued().size();
  CHECK(queued > 10'000 && queued < 100'000);
  leader.offer(kA, {100'001, 5, largest});  // gradients come through
  CHECK_EQ(leader.queued().size(), queued + 1);
  const auto round = leader.cut(5);
  CHECK(round && round->contributions.size() == queued + 1);
  leader.offer(kA, {100'002, 0, largest});
  leader.offer(kB, {1, 5, largest});
  CHECK_EQ(leader.queued().size(), 2u);
}

TEST("leader: the sum of what a member has queued is bounded, and others' is their own") {
  Leader leader = make_leader();
  for (std::uint64_t k = 1; k <= 1000; ++k) leader.offer(kA, {k, kLargestBatch, {}});
  CHECK_EQ(leader.queued().size(), 256u);  // 2^48
  leader.offer(kB, {1, kLargestBatch, {}});
  CHECK_EQ(leader.queued().size(), 257u);
}

TEST("leader: who has had a snapshot gets no other within a second") {
  Leader leader = make_leader();
  const Time start(seconds(5));
  leader.request_state(start, kC);
  CHECK(leader.promise(start).has_value());
  leader.captured();
  leader.request_state(start + milliseconds(1), kC);
  CHECK(!leader.promise(start + milliseconds(900)));
  CHECK_EQ(*leader.promise_due(), start + seconds(1));
  CHECK(leader.promise(start + seconds(1)).has_value());
}

TEST("leader: checksums of rounds to come push out none of rounds that were") {
  Leader leader = make_leader();
  leader.checksum(kA, kA, {10, 1});
  for (std::uint64_t round = 11; round < 100; ++round) leader.checksum(kB, kA, {round, 7});
  CHECK((leader.checksum(kB, kA, {10, 2}) == std::vector<Uid>{kB}));
}

TEST("leader: cuts wait for HAVE of the rounds under way and for full result slots") {
  Leader leader = make_leader(1);
  for (std::uint64_t k = 1; k <= 9; ++k) leader.offer(kA, {k, 1, {}});
  CHECK(leader.cut(1).has_value());
  CHECK(!leader.cut(1));  // round 11 is under way
  CHECK((leader.without_oldest() == std::vector<Uid>{kA, kB}));
  leader.have(kA, {11, 11, true});
  CHECK_EQ(leader.stable(), std::uint64_t{10});
  leader.have(kB, {11, 10, true});
  CHECK_EQ(leader.stable(), std::uint64_t{11});  // the observer is not waited for
  CHECK(leader.cut(1).has_value());
  leader.have(kA, {12, 12, true});
  leader.have(kB, {12, 10, true});
  CHECK(!leader.cut(1));  // b's two slots hold rounds 11 and 12
  CHECK((leader.blocked_by(1) == std::vector<Uid>{kB}));
  leader.have(kB, {12, 11, true});
  CHECK(leader.cut(1).has_value());
}

TEST("leader: one snapshot for all who ask within the time, of the last round that was cut") {
  Leader leader = make_leader(2);
  const Time start(seconds(5));
  leader.offer(kA, {1, 1, {}});
  CHECK(leader.cut(1).has_value());
  leader.request_state(start, kC);
  const auto id = leader.promise(start);  // c is the only one in need: no reason to wait
  CHECK(id.has_value() && id->version == 11 && id->epoch == 4);
  CHECK(!leader.promise(start));
  CHECK((leader.captured() == std::vector<Uid>{kC}));
  CHECK(!leader.snapshot_complete(kC, {4, 99}));
  CHECK(leader.snapshot_complete(kC, *id));
  leader.request_state(start, kB);  // it gave up what it had
  CHECK_EQ(*leader.promise_due(), start + milliseconds(100));
  CHECK(leader.promise(start + milliseconds(100)).has_value());
}

TEST("leader: differing checksums are told once each") {
  Leader leader = make_leader();
  CHECK(leader.checksum(kB, kA, {10, 7}).empty());
  CHECK((leader.checksum(kA, kA, {10, 8}) == std::vector<Uid>{kB}));
  CHECK((leader.checksum(kC, kA, {10, 9}) == std::vector<Uid>{kC}));
  CHECK(leader.checksum(kC, kA, {11, 9}).empty());
}

}  // namespace
