#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/barrier.h"
#include "base/thread_safety.h"
#include "group/member.h"
#include "runtime/engine/action_pump.h"
#include "runtime/engine/future.h"
#include "runtime/engine/reminder.h"
#include "runtime/group/operation_runner.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/peer/service_router.h"

namespace moolink::runtime {

// The interface of an accumulator for its group.
class ViewObserver {
 public:
  virtual ~ViewObserver() = default;
  // Also for soft views, which become active when every accumulator has called activate().
  virtual void new_view(Time now, const group::SharedView& view) MOOLINK_LOCKED = 0;
  virtual void evicted(Time now) MOOLINK_LOCKED = 0;
  // With any peer, also one outside the view.
  virtual void session_lost(const Uid& instance) MOOLINK_LOCKED = 0;
  // There is a refusal for throw_refusal().
  virtual void refused() MOOLINK_LOCKED = 0;

 private:
  friend class GroupPeer;
  std::uint64_t activated_ = 0;  // the epoch
  bool has_state_ = false;
};

// One group on a peer: membership and operations. Only update() changes the user's view.
class GroupPeer final : public Driven, private PeerObserver {
 public:
  // Runs the user's operation over the members' values in rank order, on a worker.
  using Combine =
      std::function<std::variant<wire::Payload, Error>(const std::vector<wire::Payload>&)>;

  GroupPeer(std::shared_ptr<RpcPeer> rpc, std::string name);
  ~GroupPeer() override;

  const std::shared_ptr<RpcPeer>& rpc() const { return rpc_; }
  const std::string& name() const { return name_; }

  // --- update() and the state it shows belong to one thread at a time
  // Whether the view changed. Throws like throw_refusal().
  bool update() MOOLINK_UNLOCKED;
  // Whether update() would return true, or throw. On any thread.
  bool is_outdated() MOOLINK_UNLOCKED;
  const group::View& view() const { return *seen_; }  // as of the last update(); empty: none
  // Waits until update() would show a view of at least `count` members, or would throw. Returns
  // false if the deadline passed. Throws Exception{closed}.
  bool wait_for_members(std::size_t count, Time deadline, const Engine::Interrupt& interrupt)
      MOOLINK_UNLOCKED;
  std::string waiting_for() MOOLINK_UNLOCKED;
  void set_timeout(Duration evict_after) MOOLINK_UNLOCKED;
  void set_sort_order(std::int64_t sort) MOOLINK_UNLOCKED;
  void set_broker_name(const std::string& name) MOOLINK_UNLOCKED;
  // This member's result is written to `output`, which the future holds; with `lent` the
  // input is used until the future is done, else the operation owns it. `epoch`: the low bits of
  // the epoch that update() must have shown last, or 0. Throws Exception{closed} while this peer is
  // in no view, Exception{group_changed} if the view is not the one that the user knows,
  // Exception{invalid_argument} for sizes that do not fit.
  std::shared_ptr<Future> collective(const std::string& operation, collective::OpSpec spec,
                                     Buffer input, MutableBuffer output, bool lent, bool retry,
                                     std::uint32_t epoch = 0) MOOLINK_UNLOCKED;
  // The name by which calls reach that member of the view, not a holder of the group's key that has
  // taken its name.
  std::string name_for_calls(const std::string& member) MOOLINK_UNLOCKED;
  // Whether all members of the newest view are on this host.
  bool on_one_host() MOOLINK_UNLOCKED;
  std::shared_ptr<Future> all_reduce_value(const std::string& operation, wire::Payload value,
                                           Combine combine, bool retry) MOOLINK_UNLOCKED;
  void close() MOOLINK_UNLOCKED;

  // --- for accumulators
  // Throws Exception{invalid_argument} if the others here have another role.
  void check_role(group::Role role) const MOOLINK_LOCKED;
  void add(Time now, ViewObserver& observer, group::Role role) MOOLINK_LOCKED;
  void remove(Time now, ViewObserver& observer) MOOLINK_LOCKED;
  // The observer has reached the boundary at which it enters the view.
  void activate(Time now, ViewObserver& observer, std::uint64_t epoch) MOOLINK_LOCKED;
  // Whether the observer has the state that the members share.
  void set_has_state(Time now, ViewObserver& observer, bool has_state) MOOLINK_LOCKED;
  // That peer sent a frame of an older epoch: tells it the present view.
  void stale_frame(Time now, const Uid& from, std::uint64_t epoch) MOOLINK_LOCKED;
  void ask_demotion(Time now, const Uid& instance) MOOLINK_LOCKED;
  // While this peer is in no view: throws Exception{auth}, once each time its key was refused where
  // it looks for the broker.
  void throw_refusal() MOOLINK_LOCKED;
  // The exception barrier for errors that concern only this peer's part in the group: soon it
  // leaves, for that reason, and joins again as a newcomer.
  void start_over(const Error& error) noexcept MOOLINK_LOCKED;
  // An event of a machine of the group. The sender's errors are rethrown; any other error leaves
  // the machine in the middle of the event, so this peer starts over.
  template <class Event>
  void event_from(Event&& event) MOOLINK_LOCKED {
    try {
      event();
    } catch (...) {
      const Error error = current_error();
      if (error.code != ErrorCode::error) throw;
      start_over(error);
    }
  }
  const group::Member& member() const MOOLINK_LOCKED { return member_; }
  bool closed() const MOOLINK_LOCKED { return closed_; }

  // --- Driven
  void tick(Time now) MOOLINK_LOCKED override;
  Time next_deadline() const MOOLINK_LOCKED override;
  void describe(Time now, Describe how, std::string& text) const MOOLINK_LOCKED override;

 private:
  GroupPeer(const Engine::Lock& held, std::shared_ptr<RpcPeer> rpc, std::string name);
  struct Running {
    std::string operation;
    std::shared_ptr<Future> future;
    Time deadline = kNever;
    Combine combine;
    bool asked_why = false;
  };

  bool is_broker(const std::string& name, const Uid& instance, const std::string& scope)
      MOOLINK_LOCKED;
  void peer_up(const rpc::PeerUp& peer) MOOLINK_LOCKED override;
  void peer_down(const rpc::PeerDown& peer) MOOLINK_LOCKED override;
  // As if a session with it had been lost.
  void undelivered(const Uid& instance) MOOLINK_LOCKED override {
    lost_session(io::now(), instance, group::Down::unreachable);
  }
  void lost_session(Time now, const Uid& instance, group::Down how) MOOLINK_LOCKED;
  void refused(const rpc::Refused& refusal) MOOLINK_LOCKED override;
  void failed(const Error& error) MOOLINK_LOCKED override { start_over(error); }
  void closing() MOOLINK_LOCKED override { shut(); }
  bool has_delivered() const MOOLINK_LOCKED override;
  struct MembersWaiter {
    std::size_t count;
    Waiter waiter;
  };

  // Also true if update() would throw, so that a waiting thread gets the error.
  bool has_members(std::size_t count) const MOOLINK_LOCKED {
    return closed_ || refusal_ || member_.active_view()->members.size() >= count;
  }
  void wake_waiters() MOOLINK_LOCKED;
  void carry_out(Time now) MOOLINK_LOCKED;
  void perform(Time now, group::Member::SendToBroker& action) MOOLINK_LOCKED;
  void perform(Time now, group::Member::SendToMember& action) MOOLINK_LOCKED;
  void perform(Time now, group::Member::NewView& action) MOOLINK_LOCKED;
  void perform(Time now, group::Member::Evicted& action) MOOLINK_LOCKED;
  void perform(Time, group::Member::Log& action) MOOLINK_LOCKED {
    rpc_->context()->log(action.level, std::move(action.text));
  }
  void rejoin(Time now) MOOLINK_LOCKED;
  void settle(Time now) MOOLINK_LOCKED;
  void register_services() MOOLINK_LOCKED;
  void shut() MOOLINK_LOCKED;
  void activate_when_all_have(Time now) MOOLINK_LOCKED;
  void tell_has_state(Time now) MOOLINK_LOCKED;
  void remind(Time now) MOOLINK_LOCKED;
  std::string explain(Time now) const MOOLINK_LOCKED;
  std::string how_to_reach_the_broker(Time now) const MOOLINK_LOCKED;
  // Others on this host may still take the results of operations that have ended here.
  bool nothing_runs() const MOOLINK_LOCKED {
    return running_.empty() && runner_->ended_everywhere();
  }
  void enter_in_time(Time now, const group::SharedView& view) MOOLINK_LOCKED;
  void enter(group::SharedView view) MOOLINK_LOCKED;
  void enter_newest(const std::string& operation, bool retry) MOOLINK_LOCKED;
  std::shared_ptr<Future> begin(collective::OpId op, const std::string& operation, Combine combine)
      MOOLINK_LOCKED;
  std::string begun_elsewhere() const MOOLINK_LOCKED;
  std::string own_lack(Time now) const MOOLINK_LOCKED;
  void end_late(Time now, collective::OpId op) MOOLINK_LOCKED;
  void done(collective::Engine::Done done) MOOLINK_LOCKED;
  void combine(collective::Engine::Combine combine) MOOLINK_LOCKED;
  Engine::Lock lock_open() MOOLINK_TAKES_LOCK;

  std::shared_ptr<RpcPeer> rpc_;
  const std::string name_;
  std::string broker_name_ MOOLINK_GUARDED = "broker";
  Uid broker_ MOOLINK_GUARDED;  // empty: not connected
  std::string broker_scope_ MOOLINK_GUARDED;
  Error refusal_ MOOLINK_GUARDED;  // not thrown yet
  group::Member member_ MOOLINK_GUARDED;
  std::shared_ptr<void> routed_ MOOLINK_GUARDED;
  Listed<PeerObserver> observes_ MOOLINK_GUARDED;
  Listed<Driven> driven_ MOOLINK_GUARDED;
  std::shared_ptr<OperationRunner> runner_ MOOLINK_GUARDED;
  group::SharedView seen_ = group::no_view();                     // by the user
  group::SharedView entered_ MOOLINK_GUARDED = group::no_view();  // whose members run operations
  group::SharedView next_
      MOOLINK_GUARDED;  // entered when nothing runs, or at enter_by_; null: none
  Time enter_by_ MOOLINK_GUARDED{};
  std::map<collective::OpId, Running> running_ MOOLINK_GUARDED;
  std::vector<ViewObserver*> attached_ MOOLINK_GUARDED;
  std::vector<MembersWaiter*> waiters_ MOOLINK_GUARDED;
  ActionPump pump_;
  bool starts_over_ MOOLINK_GUARDED = false;
  Error broken_by_ MOOLINK_GUARDED;
  Duration operation_timeout_ MOOLINK_GUARDED = seconds(120);
  Time waits_since_ MOOLINK_GUARDED = kNever;  // without a broker, or for the broker
  Reminder reminder_ MOOLINK_GUARDED;
  bool closed_ MOOLINK_GUARDED = false;
};

}  // namespace moolink::runtime
