#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accumulate/epoch_change.h"
#include "accumulate/leadership.h"
#include "accumulate/pending_view.h"
#include "accumulate/rounds.h"
#include "accumulate/state_transfer.h"

namespace moolink::accumulate {

// One peer's accumulator: the rounds of a group of learners, as a machine without I/O that runs on
// without Python. docs/design/protocol/accumulate.md has its states, messages and invariants.
//
// How a runtime drives it: call an event, then take_actions() and do them in order. One thread at a
// time may call it. The runtime samples user-visible state (wants_gradients, next_result,
// has_new_state) in update(), so that nothing changes between two calls of the user. It needs no
// end: a runtime that destroys it leaves the group first.
//
// The work is done by parts that own their state: EpochChange, Rounds, Leadership, StateTransfer
// and those below them. This class hands each message to its part, lets the parts do what is due
// after each event, and carries out what concerns several of them: the beginning and end of an
// epoch.
class Machine {
 public:
  explicit Machine(Config config);

  // --- events from the network and the group ---------------------------------------------------
  // Every NewView of the group's member, which must hold soft views back (hold_soft_views(true)).
  void view(Time now, const group::SharedView& view);
  void evicted(Time now);  // out of the group until the next view
  // The session with that peer was lost, with the messages in flight both ways: silence in this
  // epoch is not held against that peer.
  void session_lost(const Uid& instance) { leadership_.session_lost(instance); }
  void received(Time now, const Uid& from, std::uint8_t service, const wire::Payload& payload);
  // `exclusive`: no other code has the result's memory, so the user may get the memory itself.
  void reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result,
               bool exclusive = false);
  // A reduction ended with an error other than group_changed.
  void reduce_failed(Time now, std::uint64_t epoch, std::uint64_t round, const Error& error) {
    settle_if(rounds_.reduce_failed(epoch, round, error), now);
  }
  // All members of the epoch have attached its shared segment: from now on the leader assigns the
  // reduction of each round it cuts to that segment.
  void shared_ready(std::uint64_t epoch) { leadership_.shared_ready(epoch); }
  void tick(Time now);
  Time next_deadline() const;

  // --- events from the user, all called from update(), reduce_gradients() and the like -----------
  // The user's thread is alive; a peer without state asks for it only then.
  void user_active(Time now);
  // The model version of the parameters this peer was started with (a checkpoint's).
  void set_model_version(std::uint64_t version);
  // Both throw Exception{invalid_argument} unless positive, and rounds at most kMostParallel. The
  // leader's settings hold for all; a member whose own differ for settings_timeout has Failed.
  void set_virtual_batch_size(std::int64_t size) { settings_.set_virtual_batch_size(size); }
  void set_parallel_gradients(std::uint32_t rounds);
  // A contribution of `batch` > 0 with its frozen bucket, or batch == 0 with none: statistics only
  // (skip_gradients). Returns its number k. The bucket is never written from now on; it is released
  // once its round is at every member. Throws Exception{invalid_argument}.
  // With `progress`, the user is still writing the bucket. The bytes that `progress` has reached do
  // not change any more.
  std::uint64_t offer(Time now, Buffer bucket, std::int64_t batch, Counters counters,
                      std::shared_ptr<const Progress> progress = {});
  // `progress` of contribution k has reached the end.
  void written(Time now, std::uint64_t k);
  // The user will not write the rest of contribution k. If its round was cut, another epoch begins,
  // in which the round never happened.
  void withdraw(Time now, std::uint64_t k);
  // The user has applied round r (from next_result()): model_version() == r from now on.
  void delivered(Time now, std::uint64_t r);
  // The memory of next_result(), which the user may write. Only if its may_take is set: every
  // member has the result, so this copy is given to no other member.
  Buffer take_result(std::uint64_t round) { return ledger_.take(round); }
  // The user says that this member's parameters differ from the leader's: it becomes a newcomer.
  void resync(Time now) { settle_if(transfer_.resync(), now); }
  void set_state(Time now, wire::Payload state) {
    settle_if(leadership_.set_state(std::move(state)), now);
  }
  // The user has installed that state of new_state(): model_version() is its version from now on.
  // No effect if another state has replaced it.
  void state_installed(Time now, std::uint64_t number) {
    settle_if(transfer_.installed(number), now);
  }
  // The user cannot install it: this peer becomes a newcomer as soon as it can.
  void refuse_state(Time now, std::uint64_t number) { settle_if(transfer_.refuse(number), now); }
  // A checksum of the parameters right after `round`, from every member every N rounds.
  void checksum(Time now, std::uint64_t round, std::uint64_t value) {
    settle_if(rounds_.checksum(round, value), now);
  }

  std::vector<Action> take_actions() { return outbox_.take(); }

  // --- the user's view ---------------------------------------------------------------------------
  bool connected() const {  // in the group, takes part, and the user has the state
    return !epoch_.is_outside() && epoch_.takes_part() && model_.is_installed();
  }
  bool wants_gradients(Time now) const { return !wants_state() && rounds_.wants_gradients(now); }
  // The model version at which set_state() is wanted, with parameters, buffers and user state;
  // next_result() returns nothing until that call. After a bounded time the runtime makes it
  // without user state.
  std::optional<std::uint64_t> wants_state() const { return leadership_.wants_state(); }
  // A complete snapshot waits; it takes precedence over next_result().
  bool has_new_state() const { return transfer_.has_new_state(); }
  std::optional<NewState> new_state() const { return transfer_.new_state(); }
  std::optional<Round> next_result() const {
    return leadership_.holds_results_back() ? std::nullopt : rounds_.next_result();
  }
  std::uint64_t model_version() const { return model_.version(); }
  // Whether every member has the round that led to it, so that none needs this member's copy.
  bool is_everywhere() const { return ledger_.stable() >= model_.version(); }
  std::optional<std::string> leader() const;  // its name, in an active epoch
  bool is_leader() const { return epoch_.is_leader(); }
  std::uint64_t epoch() const { return epoch_.is_outside() ? 0 : epoch_.number(); }
  // Names of the members for which the group waits now (full slots, no HAVE, no FLUSH), for stats.
  std::vector<std::string> waiting_for() const;
  // Human-readable: the cause of this peer's wait in its epoch, and a remedy; empty outside an
  // epoch.
  std::string explain() const;
  // Human-readable: how much of the next round's batch is here; empty at other members than the
  // leader.
  std::string gathered() const { return leadership_.gathered(); }

 private:
  // Messages and due work.
  void handle(Time now, Inbound inbound);
  void handle_waiting(Time now, Inbound inbound);
  bool is_ready_for(const Message& message) const;
  void settle(Time now);
  void settle_if(bool changed, Time now) {
    if (changed) settle(now);
  }
  void progress(Time now);
  bool is_watching() const;

  // What concerns several parts: from a view to an active epoch.
  void enter(group::SharedView view);
  void leave_epoch();
  void send_flush();
  Flush facts() const;
  void carry_out(Time now, const MemberStatus& mine);
  void begin_history(std::uint64_t version);
  void ready_when_complete();
  void activate(const Go& go);

  // Messages, in the order of messages.h.
  void on(const Arrival& at, const Offer& offer) { leadership_.offer(at.from, offer); }
  void on(const Arrival& at, const Cut& cut);
  void on(const Arrival& at, const Settings& settings);
  void on(const Arrival& at, const Have& have) { leadership_.have(at.from, have); }
  void on(const Arrival& at, const Stable& stable) { rounds_.stable(at.from, stable); }
  void on(const Arrival& at, const Checksum& checksum) { leadership_.checksum(at.from, checksum); }
  void on(const Arrival& at, const Diverged& diverged) { rounds_.diverged(at.from, diverged); }
  void on(const Arrival& at, const Flush& flush) { change_.member_flushed(at.from, flush); }
  void on(const Arrival& at, const Resume& resume);
  void on(const Arrival& at, const Ready&) { change_.member_ready(at.from); }
  void on(const Arrival& at, const Go& go) {
    if (change_.is_go(at.from)) activate(go);
  }
  void on(const Arrival& at, const Move& move) {
    if (at.from == epoch_.leader()) pending_.boundary(move.next);
  }
  void on(const Arrival& at, const FetchResult& fetch) { rounds_.hand_on(at.from, fetch.round); }
  void on(const Arrival& at, const FetchedResult& got);
  void on(const Arrival& at, const RequestState&) { leadership_.request_state(at.now, at.from); }
  void on(const Arrival& at, const SnapshotPromised& promised) {
    transfer_.promised(at.from, promised.id);
  }
  void on(const Arrival& at, const SnapshotReady& ready) {
    transfer_.ready(at.now, at.from, ready);
  }
  void on(const Arrival& at, const SnapshotComplete& complete) {
    leadership_.snapshot_complete(at.from, complete.id);
  }
  void on(const Arrival& at, const SnapshotOver& over) {
    if (at.from == epoch_.leader()) snapshots_.release(over.id);
  }

  // A part is given those above it.
  Config config_;
  Epoch epoch_;
  Inbox inbox_;
  Outbox outbox_;
  AwakeClock clock_;
  ModelState model_;
  Ledger ledger_;
  RoundSettings settings_;
  Rounds rounds_;
  SnapshotExchange snapshots_;
  StateTransfer transfer_;
  Leadership leadership_;
  EpochChange change_;
  PendingView pending_;
};

}  // namespace moolink::accumulate
