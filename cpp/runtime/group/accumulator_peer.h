#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accumulate/machine.h"
#include "base/thread_safety.h"
#include "runtime/engine/action_pump.h"
#include "runtime/engine/reminder.h"
#include "runtime/group/gradients.h"
#include "runtime/group/group_peer.h"
#include "runtime/group/operation_runner.h"

namespace moolink::runtime {

// One accumulator on a peer: carries out the actions of its machine, runs its reductions, and keeps
// the user's view constant between two calls of update(). Buckets and results are flat bytes.
class AccumulatorPeer : public Driven, private ViewObserver {
 public:
  struct Options {
    std::string name;
    std::vector<BucketSection> sections;
    std::string layout;                      // dtypes and shapes of the model, as text
    group::Role role = group::Role::member;  // or observer
  };
  // The durations of a round at this peer.
  struct Phases {
    Duration gather{-1};  // from this peer's last contribution to the cut; negative: none
    Duration reduce{};    // from the cut to the result
    Duration deliver{};   // until the user had it
  };
  struct Stats {
    accumulate::RoundRecord record;  // delivered last; round 0: none
    Phases phases;
    std::vector<std::string> contributors;               // of gradients, each once
    std::map<std::string, std::uint32_t> contributions;  // with gradients, of each of them
    // By how many updates the parameters of each contribution with gradients were behind.
    std::vector<std::uint64_t> staleness;
    std::vector<std::string> waiting_for;
    std::vector<accumulate::Contribution> lost;  // found lost since the round before
  };

  AccumulatorPeer(std::shared_ptr<GroupPeer> group, Options options);
  ~AccumulatorPeer() override;

  const std::shared_ptr<GroupPeer>& group() const { return group_; }
  std::size_t bucket_bytes() const { return layout_.bytes; }

  // --- one user thread at a time calls these
  // How update() handles parameters that differ from the leader's: throws, once; logs a line; or
  // logs a line and makes the differing peer a newcomer.
  enum class OnDivergence : std::uint8_t { raise, warn, resync };
  // Takes over the events so far. Throws the error that keeps this peer out of the group,
  // permanently or until its broker has the same key.
  void update(OnDivergence on_divergence) MOOLINK_UNLOCKED;
  // Waits until update() may have something new; false: nothing before the deadline.
  bool wait(Time deadline, const Engine::Interrupt& interrupt) MOOLINK_UNLOCKED;

  // What the user's side of the accumulator waits for, if it is more than the machine knows; "":
  // nothing. Logged if it takes long.
  void set_awaited(std::string text) MOOLINK_UNLOCKED;

  // As of the last update().
  bool connected() const { return seen_.connected; }
  bool wants_state() const { return seen_.wants_state; }
  bool state_overdue() const;  // wanted for so long that parameters alone must suffice
  bool has_new_state() const { return seen_.has_new_state; }
  bool wants_gradients() const { return seen_.wants_gradients; }
  // The next result to apply, in memory that the user owns; empty if there is none, or it was taken
  // before.
  MutableBuffer take_result() MOOLINK_UNLOCKED;
  bool has_result() const { return seen_.result && !seen_.result->result.empty(); }
  std::uint64_t model_version() const { return seen_.version; }
  bool is_everywhere() const { return seen_.is_everywhere; }  // the round of this version
  const std::string& leader() const { return seen_.leader; }
  bool is_leader() const { return seen_.is_leader; }
  std::string why_not_wanted() MOOLINK_UNLOCKED;
  Stats stats() MOOLINK_UNLOCKED;
  // For the dashboard: why the rounds of this peer do not go on.
  struct Activity {
    Duration idle{};      // since the user's last call; 0 while the user waits here
    Duration still{};     // since the user last got, or supplied, anything
    std::string awaited;  // "": nothing
  };
  Activity activity() MOOLINK_UNLOCKED;

  void set_model_version(std::uint64_t version) MOOLINK_UNLOCKED;
  void set_virtual_batch_size(std::int64_t size) MOOLINK_UNLOCKED;
  void set_parallel_gradients(std::uint32_t rounds) MOOLINK_UNLOCKED;
  // The bucket of the next contribution, to be filled with gradient times batch size.
  MutableBuffer bucket() MOOLINK_UNLOCKED;
  const BucketLayout& layout() const { return layout_; }
  void offer(std::int64_t batch, accumulate::Counters counters)
      MOOLINK_UNLOCKED;  // 0: statistics only
  // The same while the user is still filling the bucket, from its beginning. written() says how
  // many bytes are filled. The other members read them from then on; the last byte ends the
  // contribution.
  void offer_unwritten(std::int64_t batch, accumulate::Counters counters) MOOLINK_UNLOCKED;
  void written(std::size_t bytes) MOOLINK_UNLOCKED;
  // Gives up the rest of the contribution. It has no effect after the contribution's end.
  void withdraw() MOOLINK_UNLOCKED;
  void set_state(wire::Payload state) MOOLINK_UNLOCKED;
  // The state that has arrived, if it is still wanted.
  std::optional<accumulate::NewState> new_state() MOOLINK_UNLOCKED;
  // The user has installed it: its version is the model's from now on, unless another state
  // replaced it meanwhile, which is shown next.
  void state_installed(std::uint64_t number) MOOLINK_UNLOCKED;
  void refuse_state(std::uint64_t number) MOOLINK_UNLOCKED;
  // The result was applied.
  void release_result() MOOLINK_UNLOCKED;
  void checksum(std::uint64_t round, std::uint64_t value) MOOLINK_UNLOCKED;
  void close() MOOLINK_UNLOCKED;

  // --- Driven
  void tick(Time now) MOOLINK_LOCKED override;
  Time next_deadline() const MOOLINK_LOCKED override {
    return std::min(machine_.next_deadline(), runner_->next_deadline());
  }
  void describe(Time now, Describe how, std::string& text) const MOOLINK_LOCKED override;

 private:
  AccumulatorPeer(const Engine::Lock& held, std::shared_ptr<GroupPeer> group, Options options);
  // The user's thread uses it without the lock.
  struct Seen {
    bool connected = false;
    bool wants_state = false;
    Time state_wanted_at = kNever;
    bool has_new_state = false;
    bool wants_gradients = false;
    std::optional<accumulate::Round> result;
    std::uint64_t version = 0;
    bool is_everywhere = false;
    std::string leader;
    bool is_leader = false;
  };
  // A round's reduction: one operation for each section.
  struct Reduction {
    std::uint64_t epoch = 0;
    std::uint64_t round = 0;
    std::size_t missing = 0;  // sections; 0: it is over
    MutableBuffer whole;  // whose parts the sections are; empty: there is but one, over messages
    Buffer only;          // that one
  };

  void new_view(Time now, const group::SharedView& view) MOOLINK_LOCKED override;
  void evicted(Time now) MOOLINK_LOCKED override;
  void session_lost(const Uid& instance) MOOLINK_LOCKED override {
    machine_.session_lost(instance);
  }
  void refused() MOOLINK_LOCKED override { wake(); }
  void register_services(const std::string& name) MOOLINK_LOCKED;
  Engine::Lock lock_open() MOOLINK_TAKES_LOCK;
  void look(Time now) MOOLINK_LOCKED;
  void remind(Time now) MOOLINK_LOCKED;
  std::string explain(Time now) const MOOLINK_LOCKED;
  void show(Time now, const accumulate::Round& round) MOOLINK_LOCKED;
  template <class Event>
  Time from_user(Event&& event) MOOLINK_LOCKED;
  void settle(Time now) MOOLINK_LOCKED;
  void carry_out(Time now) MOOLINK_LOCKED;
  // accumulator_peer_actions.cc
  void perform(Time now, accumulate::Send& action) MOOLINK_LOCKED;
  void perform(Time now, accumulate::EnterEpoch& action) MOOLINK_LOCKED;
  void perform(Time now, accumulate::Reduce& action) MOOLINK_LOCKED;
  // Sends no message: this peer is out of the group, and will start from another state.
  void perform(Time, accumulate::Dropped&) MOOLINK_LOCKED {}
  void perform(Time now, accumulate::Lost& action) MOOLINK_LOCKED;
  void perform(Time now, accumulate::Divergence& action) MOOLINK_LOCKED;
  void perform(Time now, accumulate::Demote& action) MOOLINK_LOCKED;
  void perform(Time now, accumulate::Activate& action) MOOLINK_LOCKED {
    group_->activate(now, *this, action.epoch);
  }
  void perform(Time now, accumulate::HasState& action) MOOLINK_LOCKED {
    group_->set_has_state(now, *this, action.has_state);
  }
  void perform(Time now, accumulate::StaleFrame& action) MOOLINK_LOCKED {
    group_->stale_frame(now, action.instance, action.epoch);
  }
  void perform(Time now, accumulate::Failed& action) MOOLINK_LOCKED;
  void perform(Time, accumulate::Wake&) MOOLINK_LOCKED { wake(); }
  void perform(Time now, accumulate::Log& action) MOOLINK_LOCKED;
  // After an action fails: a message ends the session, a reduction fails, any other action makes
  // this peer start over.
  void end(const accumulate::Send& action, const Error& error) MOOLINK_LOCKED {
    rpc_->fail_peer(action.instance, error);
  }
  void end(const accumulate::Reduce& action, const Error& error) MOOLINK_LOCKED {
    machine_.reduce_failed(io::now(), action.epoch, action.round, error);
  }
  template <class Other>
  void end(const Other& /*action*/, const Error& error) MOOLINK_LOCKED {
    group_->start_over(error);
  }
  void not_reduced(const Reduction& reduction, const Error& error) MOOLINK_LOCKED;
  collective::OpId start(const accumulate::Reduce& action, std::size_t index,
                         const MutableBuffer& whole) MOOLINK_LOCKED;
  void fail_reductions(const Error& error) MOOLINK_LOCKED;
  void section_done(collective::Engine::Done done) MOOLINK_LOCKED;
  void finish(const Reduction& reduction) MOOLINK_LOCKED;
  void offer_bucket(std::int64_t batch, accumulate::Counters counters, Buffer bucket,
                    const std::shared_ptr<Progress>& progress) MOOLINK_LOCKED;
  void wake() MOOLINK_LOCKED;

  std::shared_ptr<GroupPeer> group_;
  std::shared_ptr<RpcPeer> rpc_;
  const std::string scope_;  // "group/name", for messages to the user
  const BucketLayout layout_;
  // Keep a result's and a bucket's memory for the next round.
  std::array<std::shared_ptr<void>, 2> kept_ MOOLINK_GUARDED;
  accumulate::Machine machine_ MOOLINK_GUARDED;
  std::vector<std::shared_ptr<void>> routed_ MOOLINK_GUARDED;
  Listed<Driven> driven_ MOOLINK_GUARDED;
  std::shared_ptr<OperationRunner> runner_ MOOLINK_GUARDED;
  std::map<collective::OpId, std::shared_ptr<Reduction>> operations_ MOOLINK_GUARDED;
  Seen seen_;
  std::optional<std::uint64_t> shown_
      MOOLINK_GUARDED;  // the round that the user got and has not applied
  MutableBuffer bucket_ MOOLINK_GUARDED;
  // The contribution whose bucket_ is still being filled.
  struct Unwritten {
    std::uint64_t k = 0;
    std::shared_ptr<Progress> progress;
  };
  std::optional<Unwritten> unwritten_ MOOLINK_GUARDED;
  Stats stats_ MOOLINK_GUARDED;
  std::vector<accumulate::Contribution> lost_ MOOLINK_GUARDED;  // to report with the next round
  Error failure_ MOOLINK_GUARDED;
  Error divergence_ MOOLINK_GUARDED;
  bool diverged_here_ MOOLINK_GUARDED = false;
  Time moved_at_ MOOLINK_GUARDED;   // when the user last got, or supplied, anything
  Time called_at_ MOOLINK_GUARDED;  // the user's last call of update(), offer() or release_result()
  std::string awaited_ MOOLINK_GUARDED;
  Reminder reminder_ MOOLINK_GUARDED;
  ActionPump pump_;
  std::vector<Waiter*> waiters_ MOOLINK_GUARDED;
  bool news_ MOOLINK_GUARDED = false;
  bool closed_ MOOLINK_GUARDED = false;
};

}  // namespace moolink::runtime
