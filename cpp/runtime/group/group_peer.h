#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/barrier.h"
#include "group/member.h"
#include "runtime/engine/action_pump.h"
#include "runtime/engine/future.h"
#include "runtime/engine/reminder.h"
#include "runtime/group/operation_runner.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/peer/service_router.h"

namespace moolink::runtime {

// An accumulator, as its group sees it; called with the engine's lock held.
class ViewObserver {
 public:
  virtual ~ViewObserver() = default;
  // Also for soft views, which become active when every accumulator has called activate().
  virtual void new_view(Time now, const group::View& view) = 0;
  virtual void evicted(Time now) = 0;
  // With any peer, also one outside the view.
  virtual void session_lost(const Uid& instance) = 0;
  // There is a refusal for throw_refusal().
  virtual void refused() = 0;
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

  // --- without the lock; update() and the state it shows belong to one thread at a time
  // Whether the view changed. Throws like throw_refusal().
  bool update();
  const group::View& view() const { return seen_; }  // as of the last update(); empty: none
  // Waits until update() would show a view of at least `count` members, or would throw. Returns
  // false if the deadline passed. Throws Exception{closed}.
  bool wait_for_members(std::size_t count, Time deadline, const Engine::Interrupt& interrupt);
  std::string waiting_for();
  void set_timeout(Duration evict_after);
  void set_sort_order(std::int64_t sort);
  void set_broker_name(const std::string& name);
  // This member's result is written to `output`, which the future holds; with `lent` the
  // input is used until the future is done, else the operation owns it. `epoch`: the low bits of
  // the epoch that update() must have shown last, or 0. Throws Exception{closed} while this peer is
  // in no view, Exception{group_changed} if the view is not the one that the user knows,
  // Exception{invalid_argument} for sizes that do not fit.
  std::shared_ptr<Future> collective(const std::string& operation, collective::OpSpec spec,
                                     Buffer input, MutableBuffer output, bool lent, bool retry,
                                     std::uint32_t epoch = 0);
  // Whether all members of the newest view are on this host.
  bool on_one_host();
  std::shared_ptr<Future> all_reduce_value(const std::string& operation, wire::Payload value,
                                           Combine combine, bool retry);
  void close();

  // --- with the lock held, for accumulators
  // Throws Exception{invalid_argument} if the others here have another role.
  void check_role(group::Role role) const;
  void add(Time now, ViewObserver& observer, group::Role role);
  void remove(Time now, ViewObserver& observer);
  // The observer has reached the boundary at which it enters the view.
  void activate(Time now, const ViewObserver& observer, std::uint64_t epoch);
  // Whether the observer has the state that the members share.
  void set_has_state(Time now, const ViewObserver& observer, bool has_state);
  // That peer sent a frame of an older epoch: tells it the present view.
  void stale_frame(Time now, const Uid& from, std::uint64_t epoch);
  void ask_demotion(Time now, const Uid& instance);
  // While this peer is in no view: throws Exception{auth}, once each time its key was refused where
  // it looks for the broker.
  void throw_refusal();
  // The exception barrier for errors that concern only this peer's part in the group: soon it
  // leaves, for that reason, and joins again as a newcomer.
  void start_over(const Error& error) noexcept;
  // An event of a machine of the group. The sender's errors are rethrown; any other error leaves
  // the machine in the middle of the event, so this peer starts over.
  template <class Event>
  void event_from(Event&& event) {
    try {
      event();
    } catch (...) {
      const Error error = current_error();
      if (error.code != ErrorCode::error) throw;
      start_over(error);
    }
  }
  const group::Member& member() const { return member_; }
  bool closed() const { return closed_; }

  // --- Driven
  void tick(Time now) override;
  Time next_deadline() const override;
  void describe(Time now, Describe how, std::string& text) const override;

 private:
  GroupPeer(const Engine::Lock& held, std::shared_ptr<RpcPeer> rpc, std::string name);
  struct Attached {
    ViewObserver* observer = nullptr;
    std::uint64_t activated = 0;
    bool has_state = false;
  };
  struct Running {
    std::string operation;
    std::shared_ptr<Future> future;
    Time deadline = kNever;
    Combine combine;
    bool asked_why = false;
  };

  bool is_broker(const std::string& name, const Uid& instance, const std::string& scope);
  void peer_up(const rpc::PeerUp& peer) override;
  void peer_down(const rpc::PeerDown& peer) override;
  // As if a session with it had been lost.
  void undelivered(const Uid& instance) override {
    lost_session(io::now(), instance, group::Down::unreachable);
  }
  void lost_session(Time now, const Uid& instance, group::Down how);
  void refused(const rpc::Refused& refusal) override;
  void failed(const Error& error) override { start_over(error); }
  void closing() override { shut(); }
  bool has_delivered() const override;
  struct MembersWaiter {
    std::size_t count;
    Waiter waiter;
  };

  // Also true if update() would throw, so that a waiting thread gets the error.
  bool has_members(std::size_t count) const {
    return closed_ || refusal_ || member_.active_view().members.size() >= count;
  }
  void wake_waiters();
  void carry_out(Time now);
  void perform(Time now, group::Member::SendToBroker& action);
  void perform(Time now, group::Member::SendToMember& action);
  void perform(Time now, group::Member::NewView& action);
  void perform(Time now, group::Member::Evicted& action);
  void perform(Time, group::Member::Log& action) {
    rpc_->context()->log(action.level, std::move(action.text));
  }
  void rejoin(Time now);
  void settle(Time now);
  void register_services();
  void shut();
  void activate_when_all_have(Time now);
  void tell_has_state(Time now);
  void remind(Time now);
  std::string explain(Time now) const;
  std::string how_to_reach_the_broker(Time now) const;
  // Others on this host may still take the results of operations that have ended here.
  bool nothing_runs() const { return running_.empty() && runner_->ended_everywhere(); }
  void enter_in_time(Time now, const group::View& view);
  void enter(group::View view);
  void enter_newest(const std::string& operation, bool retry);
  std::shared_ptr<Future> begin(collective::OpId op, const std::string& operation, Combine combine);
  std::string begun_elsewhere() const;
  void end_late(Time now, collective::OpId op);
  void done(collective::Engine::Done done);
  void combine(collective::Engine::Combine combine);
  Engine::Lock lock_open();

  std::shared_ptr<RpcPeer> rpc_;
  const std::string name_;
  std::string broker_name_ = "broker";
  Uid broker_;  // empty: not connected
  std::string broker_scope_;
  Error refusal_;  // not thrown yet
  group::Member member_;
  std::shared_ptr<void> routed_;
  Listed<PeerObserver> observes_;
  Listed<Driven> driven_;
  std::shared_ptr<OperationRunner> runner_;
  group::View seen_;                 // by the user
  group::View entered_;              // whose members run operations
  std::optional<group::View> next_;  // entered when nothing runs, or at enter_by_
  Time enter_by_{};
  std::map<collective::OpId, Running> running_;
  std::vector<Attached> attached_;
  std::vector<MembersWaiter*> waiters_;
  ActionPump pump_;
  bool starts_over_ = false;
  Error broken_by_;
  Duration operation_timeout_ = seconds(120);
  Time waits_since_ = kNever;  // without a broker, or for the broker
  Reminder reminder_;
  bool closed_ = false;
};

}  // namespace moolink::runtime
