#include "runtime/group/group_peer.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "base/crash_point.h"
#include "base/names.h"
#include "base/scoped.h"
#include "io/loop.h"

namespace moolink::runtime {
namespace {

// Operations may take this long to end in the epoch before, when nothing was lost.
constexpr Duration kLastOperations = milliseconds(100);
constexpr Duration kLookAgain = milliseconds(1);  // whether they have ended at the others

bool loses_nothing(group::Cause cause) {
  return cause == group::Cause::left || cause == group::Cause::joined ||
         cause == group::Cause::ordered;
}

group::MemberConfig member_config(RpcPeer& rpc, const std::string& group) MOOLINK_LOCKED {
  check_name("a group's name", group);
  group::MemberConfig config;
  config.group = group;
  config.self = {rpc.instance(), rpc.node().name(), 0, rpc.context()->host_key(),
                 group::Role::member};
  return config;
}

Error left_error(const std::string& group) {
  return {.code = ErrorCode::closed,
          .message = "this peer has left the group '" + group + "'",
          .function = group};
}

}  // namespace

GroupPeer::GroupPeer(std::shared_ptr<RpcPeer> rpc, std::string name)
    : GroupPeer(rpc->context()->lock(), rpc, std::move(name)) {}

GroupPeer::GroupPeer(const Engine::Lock& /*held*/, std::shared_ptr<RpcPeer> rpc, std::string name)
    : rpc_(std::move(rpc)),
      name_(std::move(name)),
      member_(member_config(*rpc_, name_), io::now()) {
  register_services();
  observes_ = rpc_->add(*this);
  driven_ = rpc_->context()->engine().add(*this);
  for (const rpc::PeerInfo& peer : rpc_->node().peers(io::now())) {
    if (peer.connected) peer_up({peer.instance, peer.name, peer.host_key, false, peer.scope});
  }
  settle(io::now());
}

GroupPeer::~GroupPeer() { close(); }

void GroupPeer::register_services() {
  routed_ = rpc_->router().route(
      rpc::Service::group, name_, name_,
      [this](const Uid& from, const wire::Payload& payload) MOOLINK_LOCKED {
        const Time now = io::now();
        event_from([&]() MOOLINK_LOCKED { member_.received(now, from, payload.body.span()); });
        carry_out(now);
      });
  runner_ = std::make_shared<OperationRunner>(
      rpc_, name_, join_names({"group", name_}),
      OperationRunner::Segment{join_names({"segment", name_}), "collectives",
                               rpc::Service::collective},
      OperationRunner::Events{
          [this](collective::Engine::Combine asked) MOOLINK_LOCKED { combine(std::move(asked)); },
          [this](collective::Engine::Done ended) MOOLINK_LOCKED { done(std::move(ended)); },
          [this](const Error& error) MOOLINK_LOCKED { start_over(error); },
          [this](std::uint64_t epoch)
              MOOLINK_LOCKED { runner_->engine().use_shared_memory(epoch); },
          [this](const Error& error) MOOLINK_LOCKED { start_over(error); }});
}

// Whatever fails, the group is closed when this returns.
void GroupPeer::close() {
  if (rpc_->context()->abandoned()) return;
  Engine::Lock lock = rpc_->context()->lock();
  const auto wait = [&]() MOOLINK_LOCKED {
    rpc_->wait_until_delivered(lock, [this]() MOOLINK_LOCKED { return has_delivered(); });
  };
  guard(wait, [](const Error&) {});
  shut();
}

// Results of this member may still be in transit to others. The broker's message that this member
// left could overtake them, and would fail operations there that have ended here.
bool GroupPeer::has_delivered() const {
  const auto flushed = [this](const group::MemberInfo& member)
                           MOOLINK_LOCKED { return rpc_->node().flushed(member.instance); };
  return closed_ ||
         (runner_->ended_everywhere() && std::ranges::all_of(entered_->members, flushed));
}

void GroupPeer::shut() {
  if (std::exchange(closed_, true)) return;
  const Time now = io::now();
  const auto ignore = [](const Error&) {};
  const auto say = [&]() MOOLINK_LOCKED {
    member_.leave(now);
    carry_out(now);
    rpc_->flush();
  };
  guard(say, ignore);
  wake_waiters();
  next_.reset();
  runner_->close();
  routed_.reset();
  observes_.reset();
  driven_.reset();
  for (std::size_t i = attached_.size(); i-- > 0;) {
    guard([&]() MOOLINK_LOCKED { attached_[i]->evicted(now); }, ignore);
  }
  for (const auto& entry : std::exchange(running_, {})) {
    Future& future = *entry.second.future;
    guard([&]() MOOLINK_LOCKED { future.complete(left_error(name_)); },
          [&](const Error& error) MOOLINK_LOCKED { future.complete(error); });
  }
}

Engine::Lock GroupPeer::lock_open() MOOLINK_UNCHECKED {
  Engine::Lock lock = rpc_->context()->lock();
  if (closed_) throw Exception(left_error(name_));
  return lock;
}

// --- membership

bool GroupPeer::update() {
  const Engine::Lock lock = lock_open();
  throw_refusal();
  const group::SharedView& active = member_.active_view();
  if (active == seen_ || *active == *seen_) return false;
  seen_ = active;
  return true;
}

bool GroupPeer::is_outdated() {
  const Engine::Lock lock = rpc_->context()->lock();
  return closed_ || refusal_ || *member_.active_view() != *seen_;
}

bool GroupPeer::wait_for_members(std::size_t count, Time deadline,
                                 const Engine::Interrupt& interrupt) {
  Engine::Lock lock = lock_open();
  if (has_members(count)) return true;
  MembersWaiter waiting{count, {}};
  waiting.waiter.what = "members of a group";
  waiting.waiter.explain = [this, count](Time) MOOLINK_LOCKED {
    if (!member_.waiting_for().empty()) return std::string();  // remind() logs it
    const std::size_t present = member_.active_view()->members.size();
    return "group '" + name_ + "' has " + std::to_string(present) + " of " + std::to_string(count) +
           " members: start the others";
  };
  const Listed listed(waiters_, waiting);
  const bool done = rpc_->context()->wait(lock, waiting.waiter, deadline, interrupt);
  if (closed_) throw Exception(left_error(name_));
  return done;
}

void GroupPeer::wake_waiters() {
  for (MembersWaiter* waiting : waiters_) {
    if (has_members(waiting->count)) rpc_->context()->engine().finish(waiting->waiter);
  }
}

void GroupPeer::set_timeout(Duration evict_after) {
  const Engine::Lock lock = lock_open();
  operation_timeout_ = std::max<Duration>(evict_after, seconds(1));
  member_.set_evict_after(io::now(), operation_timeout_);
  settle(io::now());
}

void GroupPeer::set_sort_order(std::int64_t sort) {
  const Engine::Lock lock = lock_open();
  member_.set_sort_order(io::now(), sort);
  settle(io::now());
}

void GroupPeer::set_broker_name(const std::string& name) {
  const Engine::Lock lock = lock_open();
  if (name == broker_name_) return;
  broker_name_ = name;
  const Time now = io::now();
  broker_ = {};
  member_.broker_down(now);
  for (const rpc::PeerInfo& peer : rpc_->node().peers(now)) {
    if (peer.connected && is_broker(peer.name, peer.instance, peer.scope)) {
      member_.broker_up(now, broker_ = peer.instance);
    }
  }
  settle(now);
}

// A peer whose key confines it to another group cannot be the broker of this one; a peer whose key
// confines it to this one does not replace one that holds the job's token.
bool GroupPeer::is_broker(const std::string& name, const Uid& instance, const std::string& scope) {
  if (name != broker_name_ || !rpc_->node().may_concern(instance, name_)) return false;
  if (broker_ && broker_scope_.empty() && !scope.empty()) return false;
  broker_scope_ = scope;
  return true;
}

void GroupPeer::peer_up(const rpc::PeerUp& peer) {
  const Time now = io::now();
  if (is_broker(peer.name, peer.instance, peer.scope)) {
    broker_ = peer.instance;
    member_.broker_up(now, broker_);
  }
  member_.peer_up(now, peer.instance);
  carry_out(now);
}

void GroupPeer::peer_down(const rpc::PeerDown& peer) {
  const Time now = io::now();
  if (peer.instance == broker_) {
    broker_ = {};
    member_.broker_down(now);
  }
  lost_session(now, peer.instance, peer.how);
}

void GroupPeer::lost_session(Time now, const Uid& instance, group::Down how) {
  for (ViewObserver* observer : attached_) observer->session_lost(instance);
  member_.peer_down(now, instance, how);
  carry_out(now);
}

// A member of a group continues without a broker; a peer that waits for one would wait for ever.
void GroupPeer::refused(const rpc::Refused& refusal) {
  const bool of_broker = refusal.name == broker_name_ || refusal.only_way;
  if (!of_broker || broker_ || !member_.view()->empty()) return;
  refusal_ = refusal.error;
  refusal_.function = name_;
  refusal_.message = "group '" + name_ + "' has no broker: " + refusal_.message;
  for (ViewObserver* observer : attached_) observer->refused();
  wake_waiters();
}

void GroupPeer::throw_refusal() {
  const Error refusal = std::exchange(refusal_, {});
  if (refusal && !broker_ && member_.view()->empty()) throw Exception(refusal);
}

// --- accumulators

void GroupPeer::check_role(group::Role role) const {
  if (attached_.empty() || member_.config().self.role == role) return;
  throw Exception(ErrorCode::invalid_argument,
                  "the accumulators of group '" + name_ +
                      "' on this peer must all be members or all observers");
}

void GroupPeer::add(Time now, ViewObserver& observer, group::Role role) {
  attached_.push_back(&observer);
  member_.share_state(now, role);
  member_.hold_soft_views(true);
  tell_has_state(now);
  if (!member_.view()->empty()) observer.new_view(now, member_.view());
}

void GroupPeer::remove(Time now, ViewObserver& observer) {
  std::erase(attached_, &observer);
  if (closed_) return;
  if (attached_.empty()) member_.hold_soft_views(false);
  tell_has_state(now);
  activate_when_all_have(now);
}

void GroupPeer::activate(Time now, ViewObserver& observer, std::uint64_t epoch) {
  observer.activated_ = epoch;
  activate_when_all_have(now);
}

void GroupPeer::activate_when_all_have(Time now) {
  const std::uint64_t newest = member_.view()->epoch;
  const bool all = std::ranges::all_of(
      attached_, [&](const ViewObserver* observer) { return observer->activated_ >= newest; });
  if (!all || member_.active_view()->epoch == newest) return;
  member_.activate(now, newest);
  enter_in_time(now, member_.active_view());
  wake_waiters();
}

void GroupPeer::set_has_state(Time now, ViewObserver& observer, bool has_state) {
  observer.has_state_ = has_state;
  tell_has_state(now);
}

void GroupPeer::tell_has_state(Time now) {
  const bool has_state =
      !attached_.empty() && std::ranges::all_of(attached_, &ViewObserver::has_state_);
  member_.set_has_state(now, has_state);
  rpc_->context()->engine().rearm(next_deadline());
}

void GroupPeer::stale_frame(Time now, const Uid& from, std::uint64_t epoch) {
  const group::MemberInfo* member = member_.view()->find(from);
  member_.check_frame(now, from, member == nullptr ? "" : member->name, epoch);
  carry_out(now);
}

void GroupPeer::ask_demotion(Time now, const Uid& instance) {
  member_.ask_demotion(now, instance);
  carry_out(now);
}

void GroupPeer::tick(Time now) {
  if (starts_over_) rejoin(now);
  member_.tick(now);
  runner_->tick(now);
  carry_out(now);
  remind(now);
  if (next_ && (now >= enter_by_ || nothing_runs())) enter(next_);
  std::vector<collective::OpId> late;
  for (const auto& [op, running] : running_) {
    if (running.deadline <= now) late.push_back(op);
  }
  for (const collective::OpId op : late) end_late(now, op);
  runner_->carry_out();
}

Time GroupPeer::next_deadline() const {
  if (starts_over_) return {};
  Time deadline = std::min(member_.next_deadline(), runner_->next_deadline());
  if (next_) deadline = std::min(deadline, running_.empty() ? io::now() + kLookAgain : enter_by_);
  if (waits_since_ != kNever) deadline = std::min(deadline, reminder_.next(waits_since_));
  for (const auto& [op, running] : running_) deadline = std::min(deadline, running.deadline);
  return deadline;
}

void GroupPeer::carry_out(Time now) {
  pump_.run([this]() MOOLINK_LOCKED { return member_.drain(); },
            [&](auto& action) MOOLINK_LOCKED { perform(now, action); },
            [this](auto&, const Error& error) MOOLINK_LOCKED { start_over(error); });
  wake_waiters();
}

void GroupPeer::perform(Time, group::Member::SendToBroker& action) {
  rpc_->send_service_to({}, broker_name_, rpc::Service::group, {action.bytes, {}}, name_);
  crash_point("announce.sent");
}

void GroupPeer::perform(Time, group::Member::SendToMember& action) {
  rpc_->send_service_to(action.instance, action.name, rpc::Service::group, {action.bytes, {}},
                        name_);
}

void GroupPeer::perform(Time now, group::Member::NewView& action) {
  rpc_->context()->recorder().record(now, FlightKind::view, rpc_->node().name(), "",
                                     action.view->epoch, group::describe(*action.view));
  if (action.active) enter_in_time(now, action.view);
  for (ViewObserver* observer : std::vector(attached_)) observer->new_view(now, action.view);
}

void GroupPeer::perform(Time now, group::Member::Evicted&) {
  enter(group::no_view());
  for (ViewObserver* observer : std::vector(attached_)) observer->evicted(now);
}

// Deferred to tick(): a machine may be in the middle of an event now.
void GroupPeer::start_over(const Error& error) noexcept {
  if (closed_ || std::exchange(starts_over_, true)) return;
  guard([&]() MOOLINK_LOCKED { broken_by_ = error; }, [](const Error&) {});
}

void GroupPeer::rejoin(Time now) {
  Error error{.code = ErrorCode::error,
              .message = "group '" + name_ +
                         "': this peer joins it again after an error: " + broken_by_.message,
              .function = name_,
              .ran = Ran::maybe};
  rpc_->context()->log(LogLevel::error, error.message);
  group::Member anew(member_.config(), now);
  anew.hold_soft_views(!attached_.empty());
  member_.leave(now);
  carry_out(now);
  member_ = std::move(anew);
  for (auto running = running_.begin(); running != running_.end(); running = running_.begin()) {
    running->second.future->complete(error);
    running_.erase(running);
  }
  runner_->engine().drop_operations();
  enter(group::no_view());
  for (ViewObserver* observer : attached_) {
    observer->activated_ = 0;
    observer->has_state_ = false;
  }
  for (ViewObserver* observer : std::vector(attached_)) observer->evicted(now);
  if (broker_) member_.broker_up(now, broker_);
  starts_over_ = false;
}

// After an event from outside the loop.
void GroupPeer::settle(Time now) {
  carry_out(now);
  runner_->carry_out();
  rpc_->settle(next_deadline());
}

// A member that left in order has ended its operations. Others may still be ending them: they have
// all data they need from it, but the new view would fail them.
void GroupPeer::enter_in_time(Time now, const group::SharedView& view) {
  if (nothing_runs() || !loses_nothing(view->cause)) return enter(view);
  if (!next_) enter_by_ = now + kLastOperations;
  next_ = view;
}

// Operations now run among the members of `view`.
void GroupPeer::enter(group::SharedView view) {
  next_.reset();
  std::vector<collective::EpochMembers::Member> members;
  for (std::size_t rank = 0; rank < view->participants(); ++rank) {
    const group::MemberInfo& member = view->members[rank];
    members.push_back({member.instance, member.name, member.host_key});
  }
  const Error reason = group::group_changed(name_, "an operation", *entered_, *view);
  const auto entered =
      std::make_shared<const collective::EpochMembers>(view->epoch, std::move(members));
  entered_ = std::move(view);
  runner_->enter(io::now(), entered, reason);
}

}  // namespace moolink::runtime
