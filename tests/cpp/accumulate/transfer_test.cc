#include <cstring>
#include <memory>
#include <variant>

#include "accumulate/peers.h"
#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

// Eight members, on eight hosts or on one.
void hand_on(std::size_t neighbours) {
  Peers peers(8, 0, Config{}.backlog_bytes, neighbours);
  peers.users_come();
  CHECK(peers[0].wants_state().has_value());
  const Buffer bytes = state_bytes();
  peers.give_state(bytes);
  bool relayed_early = false;
  while (peers.transfer()) {
    const bool leader_is_done = peers.chunks_sent(0) == 2 * kChunks;
    relayed_early = relayed_early || (!leader_is_done && peers.chunks_sent(1) > 0);
  }
  CHECK_EQ(peers.chunks_sent(0), 2 * kChunks);  // whatever the number of newcomers
  CHECK(relayed_early);
  std::size_t relayed = 0;
  for (std::size_t i = 1; i < peers.size(); ++i) {
    CHECK(peers.chunks_sent(i) <= 2 * kChunks);
    relayed += peers.chunks_sent(i);
    const auto state = peers[i].new_state();
    CHECK(state.has_value() && state->version == 7);
    CHECK(std::memcmp(state->state.body.data(), bytes.data(), bytes.size()) == 0);
  }
  CHECK_EQ(relayed, 5 * kChunks);
}

TEST("transfer: the leader sends a snapshot twice, and newcomers hand it on while it comes") {
  hand_on(0);
}

TEST("transfer: newcomers hand a snapshot on within a host, too") { hand_on(7); }

TEST("transfer: two promises of one version hand on the same bytes") {
  Peers peers(3, 0, Config{}.backlog_bytes, 2);
  peers.user_comes(1);
  peers.pass(milliseconds(250));  // others might have asked, too
  CHECK(peers[0].wants_state().has_value());
  const Buffer bytes = state_bytes();
  peers.give_state(bytes);
  CHECK(peers.transfer());
  peers.user_comes(2);
  peers.pass(milliseconds(250));
  CHECK(peers[0].wants_state().has_value());
  const MutableBuffer others = HeapAllocator().allocate(bytes.size());
  std::memset(others.data(), 7, others.size());
  peers.transfer_state(others);
  for (std::size_t i = 1; i < peers.size(); ++i) {
    const auto state = peers[i].new_state();
    CHECK(state.has_value() && state->version == 7);
    CHECK(std::memcmp(state->state.body.data(), bytes.data(), bytes.size()) == 0);
  }
}

TEST("transfer: a snapshot has checksums once a member on another host needs it") {
  for (const std::size_t neighbours : {1, 2}) {
    Peers peers(3, 0, Config{}.backlog_bytes, neighbours);
    peers.users_come();
    const Buffer bytes = state_bytes();
    peers.transfer_state(bytes);
    CHECK_EQ(peers.described().crc32c.size(), neighbours == 2 ? 0 : kChunks);
    for (std::size_t i = 1; i < peers.size(); ++i) {
      const auto state = peers[i].new_state();
      CHECK(state.has_value());
      CHECK(std::memcmp(state->state.body.data(), bytes.data(), bytes.size()) == 0);
    }
  }
}

TEST("transfer: rounds go on while a snapshot is on its way, and the newcomer has them all") {
  Peers peers(2);
  peers.users_come();
  peers.give_state(state_bytes());
  std::uint64_t version = 7;
  for (int i = 0; i < 10; ++i) {
    CHECK(peers.transfer());
    peers.contribute(0);
    peers.apply(0);
    CHECK_EQ(peers[0].model_version(), ++version);
    CHECK(!peers[1].has_new_state());
  }
  while (peers.transfer()) {
  }
  const auto state = peers[1].new_state();
  CHECK(state.has_value() && state->version == 7);
  peers[1].state_installed(Time(seconds(2)), state->number);
  peers.settle();
  for (std::uint64_t round = 8; round <= version; ++round) {
    CHECK(peers[1].next_result().has_value());
    CHECK_EQ(peers[1].next_result()->number(), round);
    peers.apply(1);
  }
  CHECK(!peers[1].next_result().has_value());
}

TEST("transfer: hundreds of rounds on the way of a large state do not keep a newcomer out") {
  Peers peers(2, 0, kBucketBytes);  // the state is many times as large
  peers.users_come();
  peers.give_state(state_bytes());
  for (int round = 0; round < 500; ++round) {
    peers.contribute(0);
    peers.apply(0);
  }
  while (peers.transfer()) {
  }
  const auto state = peers[1].new_state();
  CHECK(state.has_value());
  peers.install(1, state->number);
  for (int round = 0; round < 500; ++round) peers.apply(1);
  CHECK_EQ(peers[1].model_version(), 507u);
  CHECK_EQ(peers.warnings(), 0u);
}

TEST("transfer: a snapshot that its last newcomer gave up is over") {
  Peers peers(2);
  peers.users_come();
  peers.give_state(state_bytes());
  for (int round = 0; round < 2000; ++round) {  // more than a newcomer keeps
    peers.contribute(0);
    peers.apply(0);
  }
  CHECK_EQ(peers.warnings(), 1u);
  CHECK_EQ(peers.snapshots_over(), 0u);
  peers.users_come();  // it asks for another one
  CHECK_EQ(peers.snapshots_over(), 1u);
  peers.transfer_state(state_bytes());
  CHECK(peers[1].new_state().has_value());
}

TEST("rounds: whose session was lost is not demoted for its full slots, but named every 10 s") {
  for (const bool lost : {false, true}) {
    Peers peers(2);
    peers.users_come();
    peers.transfer_state(state_bytes());
    const auto state = peers[1].new_state();
    CHECK(state.has_value());
    peers.install(1, state->number);
    if (lost) peers[0].session_lost(Uid{1, 2});
    for (int round = 0; round < 4; ++round) {  // of which the other one applies none
      peers.contribute(0);
      peers.apply(0);
    }
    peers.pass(seconds(31));
    CHECK_EQ(peers.warnings(), 3u);
    CHECK_EQ(peers.demotions(), lost ? 0u : 3u);
  }
}

TEST("transfer: a state that the user refuses is dropped, and another one asked for") {
  Peers peers(2);
  peers.users_come();
  peers.transfer_state(state_bytes());
  const auto first = peers[1].new_state();
  CHECK(first.has_value());
  peers.refuse(1, first->number + 1);  // of which there is none
  CHECK(peers[1].has_new_state());
  peers.refuse(1, first->number);
  CHECK(!peers[1].has_new_state() && !peers[1].connected());
  peers.contribute(0);
  peers.apply(0);
  peers.users_come();
  CHECK(!peers[0].wants_state().has_value());  // not at once
  peers.pass(seconds(1));
  peers.users_come();
  CHECK(peers[0].wants_state().has_value());
  peers.transfer_state(state_bytes());
  const auto second = peers[1].new_state();
  CHECK(second && second->number != first->number && second->version == 8);
  peers.install(1, second->number);
  CHECK(peers[1].connected());
  CHECK_EQ(peers[1].model_version(), 8u);
}

TEST("transfer: who leads by the time that its user refuses the state asks to be succeeded") {
  Peers peers(2);
  peers.users_come();
  peers.transfer_state(state_bytes());
  peers.leave_alone(1);
  CHECK(peers[1].is_leader());
  const auto state = peers[1].new_state();
  CHECK(state.has_value());
  peers.refuse(1, state->number);
  CHECK(!peers[1].has_new_state());
  CHECK_EQ(peers.demotions(), 1u);
  peers.pass(seconds(1));
  CHECK_EQ(peers.demotions(), 1u);
  peers.leave_alone(1);  // in another epoch, which begins anew with what it has
  CHECK(peers[1].connected() && peers[1].is_leader());
}

TEST("rounds: a leader that cuts without end has no more than a few hundred reduced") {
  Peers peers(2);
  peers.hold_reductions();
  for (std::uint64_t round = 8; round < 2000; ++round) {
    peers.lie(0, 1, Cut{{round, 1, 1, {}, {{Uid{1, 1}, "p0", round, 1, 7}}}, 0});
  }
  CHECK_EQ(peers.reductions(), 256u);
  CHECK_EQ(peers.warnings(), 1u);
}

TEST("version: it is set before the group forms; later it is refused, or comes too late") {
  Peers peers(1);
  CHECK_EQ(peers[0].model_version(), 7U);
  CHECK_THROWS(peers[0].set_model_version(8), ErrorCode::invalid_argument);
  peers[0].set_model_version(7);
  Peers late(2, 9);
  CHECK_EQ(late[0].model_version(), 7U);  // of which FLUSH told the others
  CHECK_EQ(late.warnings(), 1U);
}

TEST("version: a history does not begin at the version of a state that its leader has replaced") {
  Peers peers(2);
  peers.users_come();
  peers.transfer_state(state_bytes());
  peers.enter_alone(1);  // FLUSH says version 0
  peers.install(1, peers[1].new_state()->number);
  Resume resume;
  resume.leader = Uid{1, 2};
  resume.fresh = true;
  resume.members = {{Uid{1, 1}, StateStatus::stateless, {}, {}},
                    {Uid{1, 2}, StateStatus::complete, {}, {}}};
  peers.lie(0, 1, resume);
  CHECK_EQ(peers[1].model_version(), 7U);
  CHECK_EQ(peers.demotions(), 1U);  // it asks for another view
}

TEST("rounds: a withdrawn contribution is in no round, and its round begins again") {
  for (const bool is_cut : {true, false}) {
    Peers peers(2);
    peers.share_state(state_bytes());
    if (!is_cut) peers[0].set_virtual_batch_size(2);
    peers.hold_reductions();
    const std::uint64_t k = peers.contribute_unwritten(1, std::make_shared<Progress>());
    peers.withdraw(1, k);
    CHECK_EQ(peers.demotions(), is_cut ? 1U : 0U);
    if (!is_cut) {
      peers.contribute(0);  // the leader still counts the other one, and cuts
      CHECK_EQ(peers.demotions(), 1U);
    }
    peers.hold_reductions(false);
    peers.change_epoch();
    for (const std::size_t i : {0, 1}) peers.contribute(i);
    const auto round = peers[0].next_result();
    CHECK(round && round->number() == 8);
    for (const Contribution& one : round->record.contributions) {
      CHECK(one.instance != (Uid{1, 2}) || one.k != k);
    }
  }
}

TEST("rounds: a contribution that is written for too long holds up one epoch only") {
  Peers peers(2);
  peers.share_state(state_bytes());
  peers.hold_reductions();
  const auto progress = std::make_shared<Progress>();
  const std::uint64_t k = peers.contribute_unwritten(1, progress);
  CHECK_EQ(peers.reductions(), 2U);
  peers.pass(seconds(9));
  CHECK_EQ(peers.demotions(), 0U);
  peers.pass(seconds(2));
  CHECK_EQ(peers.demotions(), 1U);
  peers.hold_reductions(false);
  peers.change_epoch();
  peers.contribute(0);
  for (const std::size_t i : {0, 1}) {
    const auto others = peers[i].next_result();
    CHECK(others && others->record.contributions.front().instance == (Uid{1, 1}));
  }
  peers.apply(0);
  peers.apply(1);
  progress->reach(kBucketBytes);
  peers.written(1, k);
  const auto round = peers[0].next_result();
  CHECK(round && round->record.contributions.front().k == k);
  peers.written(1, k);  // once is enough
  CHECK(!peers[0].next_result() || peers[0].next_result()->number() == 9);
}

}  // namespace
