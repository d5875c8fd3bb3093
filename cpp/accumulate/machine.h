#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accumulate/decision.h"
#include "accumulate/leader.h"
#include "accumulate/ledger.h"
#include "accumulate/messages.h"
#include "accumulate/snapshot.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/log.h"
#include "base/time.h"
#include "base/uid.h"
#include "collective/epoch_members.h"
#include "group/view.h"
#include "wire/payload.h"

namespace moolink::accumulate {

// A round at this member, ready for the user.
struct Round {
  RoundRecord record;
  Buffer result;          // sum of bucket_bytes, already divided by record.total; empty once taken
  bool may_take = false;  // take_result() gives the memory itself away
  RoundTimes times;

  std::uint64_t number() const { return record.round; }
};

// One peer's accumulator: the rounds of a group of learners, as a machine without I/O that runs on
// without Python. docs/design/protocol/accumulate.md has its states, messages and invariants.
//
// How a runtime drives it: call an event, then take_actions() and do them in order. The runtime
// samples user-visible state (wants_gradients, next_result, has_new_state) in update(), so that
// nothing changes between two calls of the user.
class Machine {
 public:
  struct Config {
    std::string group;
    Uid instance;
    std::string name;
    group::Role role = group::Role::member;
    // The user's own settings, used when this peer leads; 0: not set, 1 until then.
    std::int64_t virtual_batch_size = 0;
    std::uint32_t parallel_gradients = 0;  // rounds cut and not yet at every member
    std::size_t bucket_bytes = 0;          // of a contribution and of a result
    std::uint64_t layout = 0;              // hash of names, shapes and dtypes of the parameters
    std::string layout_text;  // readable form, for the error of a peer with another layout
    Duration member_stall = seconds(10);      // full result slots for this long: newcomer again
    Duration settings_timeout = seconds(10);  // with settings that are not the leader's
    Duration share_wait = seconds(1);      // then a fast member fills in for a slow one; 0: at once
    Duration soft_view_wait = seconds(1);  // a join waits at most this long for a round boundary
    Duration snapshot_gather = milliseconds(100);  // joins within this time share one snapshot
    // Of results that wait at a newcomer; more if the state is large.
    std::size_t backlog_bytes = std::size_t{256} << 20;
    std::size_t backlog_rounds = 1024;
    Duration snapshot_timeout = seconds(5);   // then another parent is asked
    std::uint32_t chunk_bytes = kChunkBytes;  // of snapshots
    std::shared_ptr<Allocator> memory;        // for received snapshots; null: the heap
  };

  // --- actions ---------------------------------------------------------------------------------
  struct Send {
    Uid instance;
    std::string name;
    std::uint8_t service = kAccumulateService;  // or kSnapshotService
    wire::Payload payload;
  };
  // Give these members to the engine of the rounds (Engine::set_members), which fails unfinished
  // rounds. Without members (epoch 0) nothing can be reduced until the next one.
  struct EnterEpoch {
    collective::SharedMembers members;  // observers are the last
  };
  // Sum the contributions of a round over the members of `epoch` and call reduced(). `inputs` are
  // this member's own buckets (none: zeros), each already multiplied by its batch size; divide the
  // result once by `total`.
  struct Reduce {
    std::uint64_t epoch = 0;
    std::uint64_t round = 0;
    std::int64_t total = 0;
    std::vector<Buffer> inputs;
    Written written;                          // how far the inputs are written
    std::vector<std::uint32_t> contributors;  // ranks in EnterEpoch's order
    std::uint64_t shared = 0;  // number of the reduction in the epoch's segment; 0: over messages
  };
  // This peer was evicted or demoted: contributions that it will not offer again. It does not know
  // whether the others kept a round with one of them.
  struct Dropped {
    std::vector<std::uint64_t> k;
  };
  // Contributions of dead members, in no round; for stats["lost"].
  struct Lost {
    std::vector<Contribution> contributions;
  };
  // Parameters differ after `round`: these members' from the leader's.
  struct Divergence {
    std::uint64_t round = 0;
    std::vector<std::string> names;
    bool here = false;  // this is one of them
  };
  // Ask the group's broker for a new view with this member as newcomer: Member::ask_demotion(). The
  // change of epoch decides about its state; HasState tells the outcome.
  struct Demote {
    Uid instance;
  };
  // Enter a soft view that the group's member holds back: Member::activate().
  struct Activate {
    std::uint64_t epoch = 0;
  };
  // Whether this peer has the group's state: Member::set_has_state().
  struct HasState {
    bool has_state = false;
  };
  // That peer sent a frame of an older epoch: Member::check_frame(), which answers STALE.
  struct StaleFrame {
    Uid instance;
    std::uint64_t epoch = 0;
  };
  // This peer's configuration cannot take part (another layout, other settings); the error says
  // what to do. With code none, it can take part again.
  struct Failed {
    Error error;
  };
  // User-visible state may have changed: wake the threads that wait in update().
  struct Wake {};
  struct Log {
    LogLevel level = LogLevel::info;
    std::string text;
  };
  using Action = std::variant<Send, EnterEpoch, Reduce, Dropped, Lost, Divergence, Demote, Activate,
                              HasState, StaleFrame, Failed, Wake, Log>;

  explicit Machine(Config config);
  ~Machine();

  // --- events from the network and the group ---------------------------------------------------
  // Every NewView of the group's member, which must hold soft views back (hold_soft_views(true)).
  void view(Time now, const group::SharedView& view);
  void evicted(Time now);  // out of the group until the next view
  // The session with that peer was lost, with the messages in flight both ways: silence in this
  // epoch is not held against that peer.
  void session_lost(const Uid& instance);
  void received(Time now, const Uid& from, std::uint8_t service, const wire::Payload& payload);
  // `exclusive`: no other code has the result's memory, so the user may get the memory itself.
  void reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result,
               bool exclusive = false);
  // A reduction ended with an error other than group_changed.
  void reduce_failed(Time now, std::uint64_t epoch, std::uint64_t round, const Error& error);
  // All members of the epoch have attached its shared segment: from now on the leader assigns the
  // reduction of each round it cuts to that segment.
  void shared_ready(std::uint64_t epoch) { shared_epoch_ = epoch; }
  void tick(Time now);
  Time next_deadline() const;

  // --- events from the user, all called from update(), reduce_gradients() and the like -----------
  // The user's thread is alive; a peer without state asks for it only then.
  void user_active(Time now);
  // The model version of the parameters this peer was started with (a checkpoint's).
  void set_model_version(std::uint64_t version);
  // Both throw Exception{invalid_argument} unless positive, and rounds at most kMostParallel. The
  // leader's settings hold for all; a member whose own differ for settings_timeout has Failed.
  void set_virtual_batch_size(std::int64_t size);
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
  void resync(Time now);
  void set_state(Time now, wire::Payload state);
  // The user has installed that state of new_state(): model_version() is its version from now on.
  // No effect if another state has replaced it.
  void state_installed(Time now, std::uint64_t number);
  // The user cannot install it: this peer becomes a newcomer as soon as it can.
  void refuse_state(Time now, std::uint64_t number);
  // A checksum of the parameters right after `round`, from every member every N rounds.
  void checksum(Time now, std::uint64_t round, std::uint64_t value);

  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }

  // --- the user's view ---------------------------------------------------------------------------
  bool connected() const;  // in an active epoch and has the state
  bool wants_gradients(Time now) const;
  // The model version at which set_state() is wanted, with parameters, buffers and user state;
  // next_result() returns nothing until that call. After a bounded time the runtime makes it
  // without user state.
  std::optional<std::uint64_t> wants_state() const { return wants_state_; }
  // A complete snapshot waits; it takes precedence over next_result().
  bool has_new_state() const { return new_state_ && !is_state_refused_; }
  struct NewState {
    std::uint64_t number = 0;  // counts the states that came to this peer
    std::uint64_t version = 0;
    wire::Payload state;
  };
  std::optional<NewState> new_state() const {
    return is_state_refused_ ? std::nullopt : new_state_;
  }
  std::optional<Round> next_result() const;
  std::uint64_t model_version() const { return user_version_; }
  // Whether every member has the round that led to it, so that none needs this member's copy.
  bool is_everywhere() const { return ledger_.stable() >= user_version_; }
  std::optional<std::string> leader() const;  // its name, in an active epoch
  bool is_leader() const { return leader_ != nullptr; }
  std::uint64_t epoch() const { return phase_ == Phase::outside ? 0 : epoch_; }
  // Names of the members for which the group waits now (full slots, no HAVE, no FLUSH), for stats.
  std::vector<std::string> waiting_for() const;
  // For people: the cause of this peer's wait in its epoch, and a remedy; empty outside an epoch.
  std::string explain() const;
  // For people: how much of the next round's batch is here; empty at other members than the leader.
  std::string gathered() const;

 private:
  // outside: in no view. flushing: FLUSH sent, RESUME awaited. resuming: carries out RESUME and
  // waits for GO. active: rounds are cut.
  enum class Phase : std::uint8_t { outside, flushing, resuming, active };
  struct Inbound {
    Uid from;
    Envelope envelope;
    std::vector<Buffer> parts;
    std::size_t bytes = 0;  // as received
  };
  // The time and the sender of a message, and its payload's parts.
  struct Arrival {
    Time now;
    const Uid& from;
    const std::vector<Buffer>& parts;
  };
  // A leader's knowledge beyond the last epoch that it led, until the next one is active.
  struct Led {
    bool led = false;
    std::vector<Contribution> queued;
    std::set<Uid> demote;
  };

  struct Blocking {
    Time since;  // by awake_
    std::uint64_t delivered = 0;
  };

  // machine.cc: dispatch and due work
  void settle(Time now);
  void progress(Time now);
  void advance_awake(Time now);
  bool is_watching() const;
  void handle(Time now, Inbound inbound);
  bool is_ready_for(const Message& message) const;
  void keep_early(Inbound inbound);
  void replay_early();
  void handle_kept(Time now, Inbound inbound);
  void send(const Uid& to, Message message, std::vector<Buffer> parts = {});
  void broadcast(const Message& message) {
    for (const group::MemberInfo& member : view_->members) send(member.instance, message);
  }
  void send_snapshot(const Uid& to, decltype(SnapshotEnvelope::message) message,
                     std::vector<Buffer> parts = {});
  std::string explain_change() const;
  std::string explain_as_leader() const;
  const std::string& name_of(const Uid& instance) const;
  std::vector<std::string> names_of(const std::vector<Uid>& instances) const;
  void wake();
  void log(LogLevel level, std::string text) { actions_.push_back(Log{level, std::move(text)}); }

  // machine_epochs.cc: from a view to an active epoch
  void enter(group::SharedView view);
  void send_flush();
  void leave_epoch();
  void enter_pending_when_due(Time now);
  const group::MemberInfo* coordinator() const;
  Flush facts() const;
  void become_stateless(std::uint64_t round);
  void begin_history(std::uint64_t version);
  const char* fault_of(const Resume& resume) const;
  void carry_out(Time now, const MemberStanding& mine);
  void ready_when_complete();
  void activate(Time now, const Go& go);
  void start_leading();
  std::vector<Uid> missing_in_flush() const;
  Time flush_deadline() const;
  void watch_flush();
  void on(const Arrival& at, const Flush& flush);
  void on(const Arrival& at, const Resume& resume);
  void on(const Arrival& at, const Ready& ready);
  void on(const Arrival& at, const Go& go);
  void on(const Arrival& at, const Move& move) {
    if (at.from == leader_id_) move_to_ = std::max(move_to_, move.next);
  }
  void on(const Arrival& at, const FetchResult& fetch);
  void on(const Arrival& at, const FetchedResult& got);

  // machine_rounds.cc: rounds in an active epoch
  void lead(Time now);
  void watch_members();
  void ask_for_view(const Uid& instance, const std::string& reason);
  void notice_whether_it_keeps_up();
  void report_have();
  void catch_up_when_cuts_were_ignored();
  void send_offer(std::uint64_t k);
  void abandon_round(std::uint64_t round);
  std::int64_t share() const;
  Settings own_settings() const;
  Settings settings() const {
    return leader_ || !leaders_settings_ ? own_settings() : *leaders_settings_;
  }
  std::string difference(const Settings& leaders) const;
  void watch_settings();
  void on(const Arrival& at, const Offer& offer) {
    if (leader_) leader_->offer(at.from, offer);
  }
  void on(const Arrival& at, const Cut& cut);
  void on(const Arrival& at, const Settings& settings);
  void on(const Arrival& at, const Have& have) {
    if (leader_) leader_->have(at.from, have);
  }
  void on(const Arrival& at, const Stable& stable);
  void on(const Arrival& at, const Checksum& checksum);
  void on(const Arrival& at, const Diverged& diverged);

  // machine_state_transfer.cc: state transfer to newcomers
  void promise_snapshot(Time now);
  void request_state();
  void resync_when_active();
  void drop_refused_state_when_active();
  void drop_new_state();
  void bound_backlog();
  void abandon_snapshot(const std::string& why);
  void pump_fetch(Time now);
  void set_fetch_info(Time now, const SnapshotInfo& info);
  void watch_fetch(Time now);
  void next_parent(Time now, const Uid& parent);
  void drop_fetch();
  bool may_come(std::uint32_t chunk) const;
  void give_chunk(std::uint32_t chunk);
  void finish_fetch_when_complete();
  void received_snapshot(Time now, const Uid& from, const wire::Payload& payload);
  void on(const Arrival& at, const RequestState&) {
    if (!leader_) return;
    for (const SnapshotId& id : leader_->request_state(at.now, at.from))
      broadcast(SnapshotOver{id});
  }
  void on(const Arrival& at, const SnapshotPromised& promised);
  void on(const Arrival& at, const SnapshotReady& ready);
  void on(const Arrival& at, const SnapshotComplete& complete);
  void on(const Arrival& at, const SnapshotOver& over) {
    if (at.from == leader_id_) held_.erase(over.id);
  }
  void on(const Arrival& at, const FetchInfo& fetch);
  void on(const Arrival& at, const SnapshotInfo& info);
  void on(const Arrival& at, const FetchChunk& fetch);
  void on(const Arrival& at, const Chunk& chunk);
  void on(const Arrival& at, const Gone& gone) {
    if (fetch_ && fetch_->id() == gone.id) next_parent(at.now, at.from);
  }

  Config config_;
  std::vector<Action> actions_;
  std::uint64_t shared_epoch_ = 0;  // the epoch whose segment all members have
  std::uint64_t shared_cuts_ = 0;   // of the active epoch
  std::deque<Inbound> loop_;        // this peer's messages to itself, and early ones to check again
  std::vector<Inbound> early_;      // of an epoch or a phase not reached yet
  std::size_t early_bytes_ = 0;

  // The epoch.
  Phase phase_ = Phase::outside;
  std::uint64_t epoch_ = 0;
  group::SharedView view_ = group::no_view();
  group::SharedView pending_view_;  // soft, until the leader names a boundary; null: none
  Time pending_deadline_ = kNever;
  std::uint64_t move_to_ = 0;     // the boundary was named for this view
  std::map<Uid, Flush> flushes_;  // at the coordinator
  std::optional<Decision> decision_;
  std::set<Uid> ready_;
  std::map<Uid, Time> late_;  // members that FLUSH after the decision, by awake_
  bool went_ = false;         // GO was sent
  std::optional<Resume> resume_;
  bool is_ready_ = false;
  Time flush_progress_{};              // by awake_
  Time flush_again_{};                 // likewise
  collective::SharedMembers members_;  // of the active epoch
  Uid leader_id_;
  std::string refused_;

  // The state, and the history it belongs to.
  Standing standing_ = Standing::stateless;
  Uid lineage_;
  std::uint64_t applied_ = 0;
  Uid applied_lineage_;
  std::uint64_t active_ = 0;
  std::uint64_t founded_ = 0;  // as in Flush
  std::uint64_t user_version_ = 0;
  bool installed_ = false;  // the user has installed the state of standing_ == complete
  bool keeps_up_ = false;
  std::size_t state_bytes_ = 0;  // of the snapshot that was fetched last
  Ledger ledger_;
  std::uint64_t known_round_ = 0;             // the last one cut in this epoch
  bool cuts_ignored_ = false;                 // in this epoch: there were too many
  std::map<Uid, std::uint64_t> contributed_;  // the last round each member contributed to
  Time fill_in_at_ = kNever;                  // from then on this member fills in for slow ones
  std::optional<Have> reported_;
  std::optional<Settings> leaders_settings_;  // of the active epoch's leader
  Time differs_since_ = kNever;               // by awake_: the user's own settings differ
  bool settings_refused_ = false;             // the user got an error about them

  // The leader.
  std::unique_ptr<Leader> leader_;
  Led led_;
  std::uint64_t announced_stable_ = 0;
  bool moved_ = false;
  bool stalled_ = false;  // its own user held up the group
  // By awake_, so that time in which this process was suspended is held against no member.
  std::map<Uid, Blocking> blocking_;  // members whose result slots are full
  std::set<Uid> sessions_lost_;       // in this epoch
  Time lagging_since_ = kNever;       // a member lacks the oldest round
  Time awake_{};                      // a clock that stops while no event comes
  Time last_event_ = kNever;
  std::optional<std::uint64_t> wants_state_;

  // State transfer.
  bool user_present_ = false;
  bool requested_ = false;
  bool resync_ = false;  // the user wants another state in place of its own
  SnapshotId snapshot_;  // promised to this peer, or installed by it
  std::optional<SnapshotFetch> fetch_;
  std::map<SnapshotId, HeldSnapshot> held_;
  std::map<std::uint32_t, std::set<Uid>> children_;  // members that wait for a chunk of fetch_
  std::set<Uid> children_info_;                      // or for its description
  std::optional<NewState> new_state_;
  std::uint64_t states_ = 0;
  bool is_state_refused_ = false;  // the user refused new_state_
  bool installed_since_flush_ = false;
  Duration ask_pause_{};  // before it asks for another one
  Time ask_again_{};      // by awake_
  Time successor_at_{};   // by awake_: when it asks to stop leading
};

}  // namespace moolink::accumulate
