#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accumulate/machine.h"
#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

constexpr std::size_t kBucketBytes = 64;
constexpr std::uint32_t kChunk = 1024;
constexpr std::size_t kChunks = 40;

// Machines of one group, whose messages arrive in order. Those of the transfers are kept apart, so
// that a test says when they go on.
class Peers {
 public:
  explicit Peers(std::size_t count, std::uint64_t set_after_flush = 0) {
    for (std::size_t i = 0; i < count; ++i) {
      Machine::Config config;
      config.group = "g";
      config.instance = Uid{1, i + 1};
      config.name = "p" + std::to_string(i);
      config.bucket_bytes = kBucketBytes;
      config.chunk_bytes = kChunk;
      machines_.push_back(std::make_unique<Machine>(config));
      view_.members.push_back({config.instance, config.name, 0, Uid{9, 9}, group::Role::member, 0});
    }
    machines_[0]->set_model_version(7);  // leads, and the others need its state
    view_.epoch = 1;
    view_.lineage = Uid{5, 5};
    for (auto& machine : machines_) machine->view(now_, view_);
    if (set_after_flush > 0) machines_[0]->set_model_version(set_after_flush);
    settle();
  }

  Machine& operator[](std::size_t index) { return *machines_[index]; }
  std::size_t size() const { return machines_.size(); }
  std::size_t chunks_sent(std::size_t index) const {
    const auto sent = chunks_sent_.find(index);
    return sent == chunks_sent_.end() ? 0 : sent->second;
  }

  std::size_t demotions() const { return demotions_; }
  std::size_t warnings() const { return warnings_; }
  void pass(Duration duration) {
    for (const Time end = now_ + duration; now_ < end;) {
      now_ += milliseconds(250);
      for (auto& machine : machines_) machine->tick(now_);
      settle();
    }
  }

  // All messages but those of transfers.
  void settle() {
    bool again = true;
    while (std::exchange(again, false)) {
      for (std::size_t i = 0; i < size(); ++i) again = carry_out(i) || again;
      for (auto mail = std::exchange(mail_, {}); !mail.empty(); mail.pop_front()) {
        again = true;
        deliver(mail.front());
      }
    }
  }
  // One message of a transfer, and what follows from it; false: there is none.
  bool transfer() {
    if (transfers_.empty()) return false;
    const Mail mail = std::move(transfers_.front());
    transfers_.pop_front();
    deliver(mail);
    settle();
    return true;
  }
  void users_come() {
    now_ += seconds(1);
    for (auto& machine : machines_) machine->user_active(now_);
    settle();
    for (auto& machine : machines_) machine->tick(now_);
    settle();
  }
  void contribute(std::size_t index) {
    machines_[index]->offer(now_, HeapAllocator().allocate(kBucketBytes), 1, {});
    settle();
  }
  void apply(std::size_t index) {
    const auto round = machines_[index]->next_result();
    if (round) machines_[index]->delivered(now_, round->number());
    settle();
  }
  void install(std::size_t index, std::uint64_t state) {
    machines_[index]->state_installed(now_, state);
    settle();
  }
  void refuse(std::size_t index, std::uint64_t state) {
    machines_[index]->refuse_state(now_, state);
    settle();
  }
  // All others die.
  void leave_alone(std::size_t index) {
    ++view_.epoch;
    group::View alone = view_;
    alone.members = {view_.members[index]};
    machines_[index]->view(now_, alone);
    settle();
  }
  // What the machine of `from` never said.
  void lie(std::size_t from, std::size_t to, Message message) {
    const Envelope envelope{"g", view_.epoch, std::move(message)};
    machines_[to]->received(now_, view_.members[from].instance, kAccumulateService,
                            {wire::encode(envelope), {}});
    settle();
  }
  // Reductions do not end any more.
  void hold_reductions() { reduces_ = false; }
  std::size_t reductions() const { return reductions_; }
  void give_state(const Buffer& bytes) {
    wire::Payload state;
    state.body = bytes;
    machines_[0]->set_state(now_, std::move(state));
    settle();
  }
  // Given, and all of it passed on.
  void transfer_state(const Buffer& bytes) {
    give_state(bytes);
    while (transfer()) {
    }
  }

 private:
  struct Mail {
    std::size_t from;
    Machine::Send send;
  };

  bool carry_out(std::size_t index) {
    const auto actions = machines_[index]->take_actions();
    for (const Machine::Action& action : actions) {
      if (const auto* send = std::get_if<Machine::Send>(&action)) {
        const bool transfer = send->service == kSnapshotService;
        if (transfer && send->payload.parts.size() == 1) ++chunks_sent_[index];
        (transfer ? transfers_ : mail_).push_back({index, *send});
      } else if (const auto* reduce = std::get_if<Machine::Reduce>(&action)) {
        ++reductions_;
        if (!reduces_) continue;
        machines_[index]->reduced(now_, reduce->epoch, reduce->round,
                                  HeapAllocator().allocate(kBucketBytes));
      } else if (const auto* log = std::get_if<Machine::Log>(&action)) {
        if (log->level == LogLevel::warning) ++warnings_;
      } else if (std::holds_alternative<Machine::Demote>(action)) {
        ++demotions_;
      }
    }
    return !actions.empty();
  }
  void deliver(const Mail& mail) {
    for (std::size_t to = 0; to < size(); ++to) {
      if (view_.members[to].instance != mail.send.instance) continue;
      machines_[to]->received(now_, view_.members[mail.from].instance, mail.send.service,
                              mail.send.payload);
    }
  }

  Time now_ = Time(seconds(1));
  group::View view_;
  std::vector<std::unique_ptr<Machine>> machines_;
  std::deque<Mail> mail_;
  std::deque<Mail> transfers_;
  std::map<std::size_t, std::size_t> chunks_sent_;
  std::size_t demotions_ = 0;
  std::size_t warnings_ = 0;
  std::size_t reductions_ = 0;
  bool reduces_ = true;
};

Buffer state_bytes() {
  const MutableBuffer state = HeapAllocator().allocate(kChunks * kChunk);
  for (std::size_t i = 0; i < state.size(); ++i) {
    state.data()[i] = static_cast<std::byte>(i * 7 + i / kChunk);
  }
  return state;
}

TEST("transfer: the leader sends a snapshot twice, and newcomers hand it on while it comes") {
  Peers peers(8);
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

}  // namespace
