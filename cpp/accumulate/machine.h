#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accumulate/messages.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/log.h"
#include "base/time.h"
#include "base/uid.h"
#include "group/view.h"
#include "wire/payload.h"

namespace moolink::accumulate {

// A round at this member, ready for the user.
struct Round {
  RoundRecord record;
  Buffer result;  // sum of bucket_bytes, already divided by record.total

  std::uint64_t number() const { return record.round; }
  std::uint32_t gradients() const;  // contributions with a bucket
  std::uint32_t skipped() const;    // without
  std::vector<std::string> contributors() const;  // names of those with a bucket, each once
};

// One peer's accumulator: the rounds of a group of learners, as a machine without I/O that needs no
// Python to go on. docs/design/protocol/accumulate.md has its states, messages and invariants.
//
// How a runtime drives it: call an event, then take_actions() and do them in order. User-visible
// state (wants_gradients, next_result, has_new_state) is sampled by the runtime in update(), so
// that nothing moves under the user's feet between two calls.
class Machine {
 public:
  struct Config {
    std::string group;
    Uid instance;
    std::string name;
    group::Role role = group::Role::member;
    std::int64_t virtual_batch_size = 1;
    std::uint32_t parallel_gradients = 1;  // rounds cut and not yet at every member
    std::size_t bucket_bytes = 0;          // of a contribution and of a result
    std::uint64_t layout = 0;              // hash of names, shapes and dtypes of the parameters
    std::string layout_text;               // the same for the error of a peer with another layout
    Duration member_stall = seconds(10);   // full result slots for this long: back to newcomer
    Duration share_wait = seconds(1);      // then a fast member fills in for a slow one; 0: at once
    Duration soft_view_wait = seconds(1);  // a join waits at most this long for a round boundary
    Duration snapshot_gather = milliseconds(100);  // joins within this time share one snapshot
    std::size_t backlog_bytes = std::size_t{256} << 20;  // of results a newcomer may pile up
    std::size_t backlog_rounds = 64;
    std::shared_ptr<Allocator> memory;  // for received snapshots; null: the heap
  };

  // --- actions ---------------------------------------------------------------------------------
  struct Send {
    Uid instance;
    std::string name;
    std::uint8_t service = kAccumulateService;  // or kSnapshotService
    wire::Payload payload;
  };
  // Give these members to the engine of the rounds (Engine::set_members), which fails what was
  // unfinished. Without members (epoch 0) nothing can be reduced until the next one.
  struct EnterEpoch {
    std::uint64_t epoch = 0;
    std::vector<Uid> instances;  // in rank order; observers are the last
    std::vector<std::string> names;
  };
  // Sum the contributions of a round over the members of `epoch` and tell reduced(). `inputs` are
  // this member's own buckets (none: zeros), each already multiplied by its batch size; the result
  // is to be divided once by `total`.
  struct Reduce {
    std::uint64_t epoch = 0;
    std::uint64_t round = 0;
    std::int64_t total = 0;
    std::vector<Buffer> inputs;
    std::vector<std::uint32_t> contributors;  // ranks in EnterEpoch's order
    std::vector<std::uint32_t> reducers;      // ranks that own slices
  };
  // Python is to call set_state() with parameters, buffers and user state, at exactly the model
  // version wants_state() names; the runtime bounds its patience and then sends without user state.
  struct WantState {
    std::uint64_t version = 0;
  };
  // Contributions of this peer that will never be in a round (it was evicted or demoted).
  struct Dropped {
    std::vector<std::uint64_t> k;
  };
  // Contributions of dead members that are in no round; for stats["lost"].
  struct Lost {
    std::vector<Contribution> contributions;
  };
  // Parameters differ after `round`: at these members from the leader's.
  struct Divergence {
    std::uint64_t round = 0;
    std::vector<std::string> names;
  };
  // Ask the group's broker for a new view, with this member as newcomer: Member::ask_demotion().
  struct Demote {
    Uid instance;
    std::string name;
    std::string reason;
  };
  // Enter a soft view that the group's member holds back: Member::activate().
  struct Activate {
    std::uint64_t epoch = 0;
  };
  // Whether this peer is in possession of the group's state: Member::set_has_state().
  struct HasState {
    bool has_state = false;
  };
  // A frame of an older epoch came from there: Member::check_frame(), which answers STALE.
  struct StaleFrame {
    Uid instance;
    std::uint64_t epoch = 0;
  };
  // The configuration of this peer cannot take part (another layout); the error says what to do.
  struct Failed {
    Error error;
  };
  // User-visible state may have changed: wake whoever waits in update().
  struct Wake {};
  struct Log {
    LogLevel level = LogLevel::info;
    std::string text;
  };
  using Action = std::variant<Send, EnterEpoch, Reduce, WantState, Dropped, Lost, Divergence, Demote,
                              Activate, HasState, StaleFrame, Failed, Wake, Log>;

  explicit Machine(Config config);
  ~Machine();

  // --- events from the network and the group ---------------------------------------------------
  // Every NewView of the group's member, which is to hold soft views back (hold_soft_views(true)).
  void view(Time now, const group::View& view);
  void evicted(Time now);  // out of the group until the next view
  void received(Time now, const Uid& from, std::uint8_t service, const wire::Payload& payload);
  void reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result);
  // A reduction ended with an error other than group_changed.
  void reduce_failed(Time now, std::uint64_t epoch, std::uint64_t round, const Error& error);
  void tick(Time now);
  Time next_deadline() const;

  // --- events from the user, all called from update(), reduce_gradients() and the like -----------
  // The user's thread is alive; a peer without state asks for it only then.
  void user_active(Time now);
  // The model version of the parameters this peer was started with (a checkpoint's).
  void set_model_version(std::uint64_t version);
  void set_virtual_batch_size(std::int64_t size);
  // A contribution of `batch` > 0 with its frozen bucket, or batch == 0 with none: statistics only
  // (skip_gradients). Returns its number k. The bucket is never written from now on; it is let go
  // once the round it is in is at every member. Throws Exception{invalid_argument}.
  std::uint64_t offer(Time now, Buffer bucket, std::int64_t batch, Counters counters);
  // The user has applied round r (the one next_result() gave): model_version() == r from now on.
  void delivered(Time now, std::uint64_t r);
  void set_state(Time now, wire::Payload state);
  // The user has installed the state of take_new_state().
  void state_installed(Time now);
  // A checksum of the parameters right after `round`, from every member every N rounds.
  void checksum(Time now, std::uint64_t round, std::uint64_t value);

  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }

  // The group that a payload of one of the two services is for; throws Exception{wire}.
  static std::string group_of(std::uint8_t service, const wire::Payload& payload);

  // --- what the user sees ------------------------------------------------------------------------
  bool connected() const;               // in an active epoch and in possession of the state
  bool wants_gradients(Time now) const;
  // The version at which set_state() is wanted; next_result() gives nothing until it was called.
  std::optional<std::uint64_t> wants_state() const;
  // A complete snapshot waits; it takes precedence over next_result().
  bool has_new_state() const;
  struct NewState {
    std::uint64_t version = 0;
    wire::Payload state;
  };
  std::optional<NewState> new_state() const;
  std::optional<Round> next_result() const;
  std::uint64_t model_version() const;
  std::optional<std::string> leader() const;  // its name, in an active epoch
  bool is_leader() const;
  std::uint64_t epoch() const;
  // Names for whom the group waits right now (full slots, no HAVE, no FLUSH), for stats.
  std::vector<std::string> waiting_for() const;

 private:
  std::vector<Action> actions_;
};

}  // namespace moolink::accumulate
