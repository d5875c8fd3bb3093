#include "accumulate/state_transfer.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/crash_point.h"

namespace moolink::accumulate {
namespace {

constexpr std::size_t kStatesOfBacklog = 4;  // bytes of rounds that wait, in sizes of the state
constexpr Duration kAskAgain = seconds(1);   // after a state that was refused; doubles
constexpr Duration kLongestAskAgain = seconds(30);

}  // namespace

// --- the user ------------------------------------------------------------------------------------

bool StateTransfer::resync() {
  if (!model_.is_installed()) return false;
  is_resync_due_ = true;
  return true;
}

bool StateTransfer::installed(std::uint64_t number) {
  if (!has_new_state() || new_state_->number != number) return false;
  model_.install(new_state_->version);
  has_installed_since_flush_ = true;
  drop_new_state();
  ask_pause_ = {};
  return true;
}

bool StateTransfer::refuse(std::uint64_t number) {
  if (!new_state_ || new_state_->number != number) return false;
  is_refused_ = true;
  ask_pause_ = std::clamp(2 * ask_pause_, kAskAgain, kLongestAskAgain);
  ask_again_ = clock_.now() + ask_pause_;
  successor_at_ = clock_.now();
  return true;
}

// --- epochs --------------------------------------------------------------------------------------

void StateTransfer::activate() {
  is_requested_ = false;
  successor_at_ = clock_.now();
}

void StateTransfer::leave_history(std::uint64_t round) {
  if (auto dropped = ledger_.drop_own(); !dropped.empty()) {
    outbox_.act(Dropped{std::move(dropped)});
  }
  ledger_.reset(round, false);
  model_.lose_with_history();
  is_resync_due_ = false;
  snapshots_.drop();
  drop_new_state();
}

// --- the snapshot --------------------------------------------------------------------------------

void StateTransfer::request_state() {
  if (!model_.is_stateless() || !epoch_.takes_part() || is_requested_) return;
  if (clock_.now() < ask_again_) return;
  if (!std::exchange(is_user_present_, false)) return;
  is_requested_ = true;
  outbox_.send(epoch_.leader(), RequestState{});
  crash_point("join");
}

void StateTransfer::promised(const Uid& from, const SnapshotId& id) {
  if (from != epoch_.leader() || !model_.is_stateless()) return;
  model_.promise(id);
  ledger_.keep_after(id.version);
  snapshots_.fetch(id);
}

void StateTransfer::ready(Time now, const Uid& from, const SnapshotReady& ready) {
  if (from != epoch_.leader() || !snapshots_.fetches(ready.info.id)) return;
  // Not out of settle(): a tick may handle a message that was kept for a later epoch.
  try {
    snapshots_.set_info(now, ready.info);
  } catch (const std::exception& e) {
    return start_over(std::string("the leader's snapshot cannot be had: ") + e.what());
  }
  snapshots_.set_parents(now, ready.info.id, ready.parents);
  advance(true);
}

void StateTransfer::advance(bool has_parent) {
  if (!has_parent) {
    return start_over("no member hands on the snapshot of version " +
                      std::to_string(model_.snapshot().version));
  }
  auto fetched = snapshots_.finish();
  if (!fetched) return;
  drop_new_state();
  new_state_ = NewState{++states_, fetched->id.version, std::move(fetched->payload)};
  model_.arrive();
  outbox_.act(HasState{true});
  if (epoch_.is_active()) outbox_.send(epoch_.leader(), SnapshotComplete{fetched->id});
  outbox_.wake();
}

// --- starting over -------------------------------------------------------------------------------

void StateTransfer::start_over(const std::string& why) {
  outbox_.log(LogLevel::warning, "starting over as a newcomer: " + why);
  ledger_.stop_keeping();
  model_.lose();
  is_requested_ = false;
  snapshots_.drop();
  drop_new_state();
  outbox_.act(HasState{false});
}

// A newcomer whose user does not take the state, or applies rounds slower than they are made,
// starts again from a later version instead of queueing results without limit.
void StateTransfer::bound_backlog() {
  if (model_.is_stateless()) return;
  // Bounded by its result slots.
  if (model_.keeps_up() && config_.role != group::Role::observer) return;
  // While a large state is on its way, many rounds pass.
  const std::size_t bytes =
      std::max(config_.backlog_bytes, kStatesOfBacklog * snapshots_.fetched_bytes());
  if (ledger_.waiting_bytes() <= bytes && ledger_.waiting() <= config_.backlog_rounds) return;
  start_over(std::to_string(ledger_.waiting()) + " rounds wait to be applied here");
}

void StateTransfer::start_over_when_wanted() {
  resync_when_due();
  drop_refused_state();
}

void StateTransfer::resync_when_due() {
  const bool is_due =
      std::exchange(is_resync_due_, false) && !epoch_.is_leader() && model_.is_installed();
  if (!is_due) return;
  // They may be in rounds of this epoch, but if no member with those rounds is left, in no later
  // one.
  Dropped dropped;
  for (const auto& [k, own] : ledger_.own()) dropped.k.push_back(k);
  if (!dropped.k.empty()) outbox_.act(std::move(dropped));
  start_over("its parameters differ from the leader's");
}

// A leader has no peer to ask for another state, so it asks for a change of epoch.
void StateTransfer::drop_refused_state() {
  if (!is_refused_) return;
  if (!epoch_.is_leader()) return start_over("the user could not install the leader's state");
  if (clock_.now() < successor_at_) return;
  successor_at_ = clock_.now() + config_.member_stall;
  outbox_.ask_for_view(epoch_.self(), "its user could not install the state of the leader before");
}

void StateTransfer::drop_new_state() {
  new_state_.reset();
  is_refused_ = false;
}

}  // namespace moolink::accumulate
