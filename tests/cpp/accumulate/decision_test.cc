#include "accumulate/decision.h"

#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

const Uid kLineage{7, 7};

Uid uid(std::uint64_t number) { return {1, number}; }

group::View view_of(std::vector<std::uint64_t> members) {
  group::View view;
  view.epoch = 9;
  view.lineage = kLineage;
  for (const std::uint64_t number : members) {
    group::MemberInfo info;
    info.instance = uid(number);
    info.name = "p" + std::to_string(number);
    view.members.push_back(info);
  }
  return view;
}

Flush complete(std::uint64_t have, std::uint64_t version) {
  Flush flush;
  flush.status = StateStatus::complete;
  flush.lineage = kLineage;
  flush.applied = flush.active = 8;
  flush.applied_lineage = kLineage;
  flush.have = have;
  flush.version = version;
  return flush;
}

KnownRound known(std::uint64_t round, bool have, std::vector<std::uint64_t> from = {}) {
  KnownRound known;
  known.record.round = round;
  known.record.epoch = 8;
  known.have = have;
  for (const std::uint64_t number : from) {
    known.record.contributions.push_back({uid(number), "p" + std::to_string(number), 1, 4});
  }
  return known;
}

TEST("decision: a round stands if one survivor has it and none before it is missing") {
  Flush a = complete(10, 10);
  Flush b = complete(11, 10);
  a.rounds = {known(11, false), known(12, true), known(14, true)};
  b.rounds = {known(11, true), known(12, false)};
  const Resume resume = decide(view_of({1, 2}), {{uid(1), a}, {uid(2), b}}).resume;
  CHECK_EQ(resume.round, std::uint64_t{12});
  CHECK_EQ(resume.rounds.size(), std::size_t{2});
  CHECK((resume.rounds[0].donors == std::vector<Uid>{uid(2)}));
  CHECK((resume.rounds[1].donors == std::vector<Uid>{uid(1)}));
  for (const auto& member : resume.members) CHECK(member.status == StateStatus::complete);
}

TEST("decision: who was not in the last active epoch is no survivor, however far it got") {
  Flush zombie = complete(30, 30);
  zombie.applied = zombie.active = 6;
  const Resume resume =
      decide(view_of({1, 2}), {{uid(1), zombie}, {uid(2), complete(12, 12)}}).resume;
  CHECK(resume.leader == uid(2));
  CHECK_EQ(resume.round, std::uint64_t{12});
  CHECK(resume.members[0].status == StateStatus::stateless);
}

TEST("decision: who did not learn any more that the epoch was active is a survivor of it") {
  Flush late = complete(12, 12);
  late.lineage = Uid{6, 6};  // of the epoch before
  late.active = 7;
  const auto status = [&] {
    return decide(view_of({1, 2}), {{uid(1), late}, {uid(2), complete(12, 12)}})
        .resume.members[0]
        .status;
  };
  CHECK(status() == StateStatus::complete);
  late.applied_lineage = Uid{6, 6};  // another group's epoch of the same number
  CHECK(status() == StateStatus::stateless);
}

TEST("decision: the old leader stays; else who applied most, then the lowest rank") {
  Flush led = complete(10, 8);
  led.led = true;
  CHECK(decide(view_of({1, 2, 3}),
               {{uid(1), complete(10, 10)}, {uid(2), complete(10, 10)}, {uid(3), led}})
            .resume.leader == uid(3));
  CHECK(decide(view_of({1, 2, 3}),
               {{uid(1), complete(10, 9)}, {uid(2), complete(10, 10)}, {uid(3), complete(10, 10)}})
            .resume.leader == uid(2));
  led.stalled = true;
  CHECK(decide(view_of({1, 3}), {{uid(1), complete(10, 9)}, {uid(3), led}}).resume.leader ==
        uid(1));
}

TEST("decision: a demotion that a leader asked for is void without that leader") {
  Flush led = complete(10, 10);
  led.led = true;
  led.demote = {uid(2)};
  const auto status = [&](std::vector<std::uint64_t> members) {
    const Resume resume =
        decide(view_of(members), {{uid(1), led}, {uid(2), complete(10, 9)}}).resume;
    return resume.members.back().status;
  };
  CHECK(status({1, 2}) == StateStatus::stateless);
  CHECK(status({2}) == StateStatus::complete);
}

TEST("decision: where nobody has the state the greatest model version begins the history") {
  Flush a;
  Flush b;
  b.version = 40;
  const Resume resume = decide(view_of({1, 2}), {{uid(1), a}, {uid(2), b}}).resume;
  CHECK(resume.fresh && resume.leader == uid(2));
  CHECK_EQ(resume.round, std::uint64_t{40});
  CHECK(resume.members[0].status == StateStatus::stateless);
  CHECK(resume.members[1].status == StateStatus::complete);
}

TEST("decision: of histories begun in epochs that were never active the last one goes on") {
  Flush first = complete(3, 3);
  first.applied = first.founded = 2;
  first.active = 0;
  first.lineage = {};
  Flush last = first;
  last.applied = 8;
  last.founded = 7;
  Resume resume = decide(view_of({1, 2}), {{uid(1), first}, {uid(2), last}}).resume;
  CHECK(!resume.fresh);
  CHECK(resume.leader == uid(2));
  CHECK(resume.members[0].status == StateStatus::stateless);
  CHECK(resume.members[1].status == StateStatus::complete);

  const Flush member = complete(5, 5);  // of one that was
  resume = decide(view_of({1, 2, 3}), {{uid(1), first}, {uid(2), last}, {uid(3), member}}).resume;
  CHECK(resume.leader == uid(3));
  CHECK(resume.members[1].status == StateStatus::stateless);
}

TEST("decision: a promised snapshot is awaited on only while somebody holds it") {
  Flush pending = complete(12, 0);
  pending.status = StateStatus::pending;
  pending.snapshot = {8, 11};
  Flush holder = complete(12, 12);
  const auto status = [&] {
    return decide(view_of({1, 2}), {{uid(1), holder}, {uid(2), pending}}).resume.members[1].status;
  };
  CHECK(status() == StateStatus::stateless);
  holder.holds = {{8, 11}};
  CHECK(status() == StateStatus::pending);
}

TEST("decision: lost are contributions of the dead that are in no round that stands") {
  Flush a = complete(11, 11);
  a.rounds = {known(11, true, {3}), known(12, false, {2, 4})};
  a.queued = {{uid(4), "p4", 2, 5}, {uid(1), "p1", 9, 5}};
  const Decision decision = decide(view_of({1, 2}), {{uid(1), a}, {uid(2), complete(11, 11)}});
  CHECK_EQ(decision.resume.round, std::uint64_t{11});
  CHECK_EQ(decision.lost.size(), std::size_t{2});
  for (const auto& lost : decision.lost) CHECK(lost.instance == uid(4));
}

TEST("decision: another model takes no part, and is told by both names") {
  Flush odd = complete(10, 10);
  odd.layout = 5;
  odd.layout_text = "w: (3, 4)";
  Flush leader = complete(10, 10);
  leader.led = true;
  const Resume resume = decide(view_of({1, 2}), {{uid(1), odd}, {uid(2), leader}}).resume;
  CHECK(resume.members[0].refused.find("p1") != std::string::npos);
  CHECK(resume.members[0].refused.find("p2") != std::string::npos);
  CHECK(resume.members[1].refused.empty());
}

}  // namespace
