// State transfer: the leader promises, captures and hands on snapshots; newcomers ask for one,
// fetch it in chunks, and catch up by ordinary rounds.

#include <algorithm>

#include "accumulate/machine.h"
#include "base/crash_point.h"
#include "base/mutant.h"

namespace moolink::accumulate {
namespace {

constexpr std::size_t kChildrensChunks = 1024;  // requested before they are known to exist
constexpr std::size_t kChildren = 2;            // of each holder, in the tree of newcomers
constexpr std::size_t kStatesOfBacklog = 4;     // bytes of rounds that wait, in sizes of the state
constexpr Duration kAskAgain = seconds(1);      // after a state that was refused; doubles
constexpr Duration kLongestAskAgain = seconds(30);

}  // namespace

// --- the leader ----------------------------------------------------------------------------------

void Machine::promise_snapshot(Time now) {
  // No promise at a near boundary: the next epoch's leader will make it.
  if (!pending_view_) {
    if (const auto id = leader_->promise(now)) {
      for (const Uid& instance : leader_->promised()->to) send(instance, SnapshotPromised{*id});
    }
  }
  const auto& promised = leader_->promised();
  if (!promised || promised->captured || wants_state_) return;
  const std::uint64_t version = promised->id.version;
  // STABLE first: a newcomer's state must never be of a round that a survivor could lack.
  const bool at_version = ledger_.delivered() == version && leader_->stable() >= version;
  if (!at_version && !mutant("snapshot_of_wrong_version")) return;
  if (!installed_) return;
  wants_state_ = version;
  wake();
}

void Machine::set_state(Time now, wire::Payload state) {
  if (!leader_ || !wants_state_) return;  // the epoch changed meanwhile: it will ask again
  wants_state_.reset();
  const SnapshotId id = leader_->promised()->id;
  // Two promises of one version have one id: all receivers get the bytes that the first ones get.
  const auto earlier = held_.find(id);
  HeldSnapshot held =
      earlier != held_.end()
          ? earlier->second
          : HeldSnapshot(describe(id, config_.layout, state, config_.chunk_bytes), state);
  const auto is_here = [this](const Uid& to) { return view_->share_host(config_.instance, to); };
  if (!std::ranges::all_of(leader_->promised()->to, is_here)) held.add_checksums();
  const std::vector<Uid> receivers = leader_->captured();
  for (std::size_t i = 0; i < receivers.size(); ++i) {
    std::vector<Uid> parents{config_.instance};
    if (i >= kChildren) parents.insert(parents.begin(), receivers[(i - kChildren) / kChildren]);
    send(receivers[i], SnapshotReady{held.info(), std::move(parents)});
    crash_point("snapshot.sent");
  }
  if (!receivers.empty()) held_.insert_or_assign(id, std::move(held));
  settle(now);
}

void Machine::on(const Arrival& at, const SnapshotComplete& complete) {
  if (leader_ && leader_->snapshot_complete(at.from, complete.id)) {
    broadcast(SnapshotOver{complete.id});
  }
}

// --- the newcomer --------------------------------------------------------------------------------

void Machine::user_active(Time now) {
  user_present_ = true;
  settle(now);
}

void Machine::request_state() {
  if (standing_ != Standing::stateless || !refused_.empty() || requested_) return;
  if (awake_ < ask_again_) return;
  if (!std::exchange(user_present_, false)) return;
  requested_ = true;
  send(leader_id_, RequestState{});
  crash_point("join");
}

void Machine::on(const Arrival& at, const SnapshotPromised& promised) {
  if (at.from != leader_id_ || standing_ != Standing::stateless) return;
  standing_ = Standing::pending;
  snapshot_ = promised.id;
  ledger_.keep_after(promised.id.version);
  fetch_.emplace(promised.id, config_.memory, config_.snapshot_timeout);
  pump_fetch(at.now);
}

void Machine::on(const Arrival& at, const SnapshotReady& ready) {
  if (at.from != leader_id_ || !fetch_ || fetch_->id() != ready.info.id) return;
  // Not out of settle(): a tick may handle a message that was kept for a later epoch.
  try {
    set_fetch_info(at.now, ready.info);
  } catch (const std::exception& e) {
    return abandon_snapshot(std::string("the leader's snapshot cannot be had: ") + e.what());
  }
  fetch_->set_parents(at.now, ready.parents);
  finish_fetch_when_complete();
  pump_fetch(at.now);
}

// A newcomer whose user does not take the state, or applies rounds slower than they are made,
// starts again from a later version instead of queueing results without limit.
void Machine::bound_backlog() {
  if (standing_ == Standing::stateless) return;
  if (keeps_up_ && config_.role != group::Role::observer) return;  // bounded by its result slots
  // While a large state is on its way, many rounds pass.
  const std::size_t bytes = std::max(config_.backlog_bytes, kStatesOfBacklog * state_bytes_);
  if (ledger_.waiting_bytes() <= bytes && ledger_.waiting() <= config_.backlog_rounds) return;
  abandon_snapshot(std::to_string(ledger_.waiting()) + " rounds wait to be applied here");
}

void Machine::abandon_snapshot(const std::string& why) {
  log(LogLevel::warning, "starting over as a newcomer: " + why);
  ledger_.stop_keeping();
  standing_ = Standing::stateless;
  installed_ = keeps_up_ = requested_ = false;
  drop_fetch();
  drop_new_state();
  actions_.push_back(HasState{false});
}

void Machine::resync(Time now) {
  if (standing_ != Standing::complete || !installed_) return;
  resync_ = true;
  if (mutant("resync_after_flush")) resync_when_active();
  settle(now);
}

// Not in a change of epoch: the facts in this member's FLUSH must stay true until it is over, or
// the member may become leader of a state that it has just given up.
void Machine::resync_when_active() {
  const bool due = std::exchange(resync_, false) && leader_ == nullptr && installed_;
  if (!due || standing_ != Standing::complete) return;
  // They may be in rounds of this epoch, but if no member with those rounds is left, in no later
  // one.
  Dropped dropped;
  for (const auto& [k, own] : ledger_.own()) dropped.k.push_back(k);
  if (!dropped.k.empty()) actions_.push_back(std::move(dropped));
  abandon_snapshot("its parameters differ from the leader's");
}

void Machine::refuse_state(Time now, std::uint64_t number) {
  if (!new_state_ || new_state_->number != number) return;
  is_state_refused_ = true;
  ask_pause_ = std::clamp(2 * ask_pause_, kAskAgain, kLongestAskAgain);
  ask_again_ = awake_ + ask_pause_;
  successor_at_ = awake_;
  settle(now);
}

// Not in a change of epoch, as with resync(): the next FLUSH says that this peer has no state. A
// leader has no peer to ask for another one, so it asks for a change of epoch.
void Machine::drop_refused_state_when_active() {
  if (!is_state_refused_) return;
  if (leader_ == nullptr) return abandon_snapshot("the user could not install the leader's state");
  if (awake_ < successor_at_) return;
  successor_at_ = awake_ + config_.member_stall;
  ask_for_view(config_.instance, "its user could not install the state of the leader before");
}

void Machine::drop_new_state() {
  new_state_.reset();
  is_state_refused_ = false;
}

void Machine::state_installed(Time now, std::uint64_t number) {
  if (!has_new_state() || new_state_->number != number) return;
  user_version_ = new_state_->version;
  installed_since_flush_ = true;
  drop_new_state();
  ask_pause_ = {};
  installed_ = true;
  settle(now);
}

// --- chunks --------------------------------------------------------------------------------------

void Machine::received_snapshot(Time now, const Uid& from, const wire::Payload& payload) {
  const auto envelope = wire::decode<SnapshotEnvelope>(payload.body);
  if (envelope.group != config_.group) return;
  const Arrival arrival{now, from, payload.parts};
  std::visit([&](const auto& message) { on(arrival, message); }, envelope.message);
}

void Machine::pump_fetch(Time now) {
  if (!fetch_) return;
  for (auto& request : fetch_->next_requests(now)) {
    std::visit([&](const auto& message) { send_snapshot(request.parent, message); },
               request.message);
  }
}

void Machine::set_fetch_info(Time now, const SnapshotInfo& info) {
  fetch_->set_info(now, info);
  state_bytes_ = total_bytes(info);
}

void Machine::watch_fetch(Time now) {
  if (!fetch_ || now < fetch_->deadline() || !fetch_->parent()) return;
  next_parent(now, *fetch_->parent());
}

void Machine::next_parent(Time now, const Uid& parent) {
  if (!fetch_) return;
  if (fetch_->give_up(now, parent)) return pump_fetch(now);
  abandon_snapshot("no member hands on the snapshot of version " +
                   std::to_string(fetch_->id().version));
}

void Machine::drop_fetch() {
  if (!fetch_) return;
  const SnapshotId id = fetch_->id();
  fetch_.reset();
  std::set<Uid> waiting = std::exchange(children_info_, {});
  for (const auto& [chunk, instances] : std::exchange(children_, {})) {
    waiting.insert(instances.begin(), instances.end());
  }
  for (const Uid& instance : waiting) send_snapshot(instance, Gone{id});
}

void Machine::finish_fetch_when_complete() {
  if (!fetch_ || !fetch_->complete()) return;
  HeldSnapshot held = fetch_->finish();
  const SnapshotId id = fetch_->id();
  drop_new_state();
  new_state_ = NewState{++states_, id.version, held.payload()};
  held_.insert_or_assign(id, std::move(held));
  drop_fetch();
  standing_ = Standing::complete;
  installed_ = false;
  actions_.push_back(HasState{true});
  if (phase_ == Phase::active) send(leader_id_, SnapshotComplete{id});
  wake();
}

void Machine::on(const Arrival& at, const FetchInfo& fetch) {
  if (const auto held = held_.find(fetch.id); held != held_.end()) {
    if (!view_->share_host(config_.instance, at.from)) held->second.add_checksums();
    send_snapshot(at.from, held->second.info());
  } else if (!fetch_ || fetch_->id() != fetch.id) {
    send_snapshot(at.from, Gone{fetch.id});
  } else if (fetch_->info()) {
    send_snapshot(at.from, *fetch_->info());
  } else {
    children_info_.insert(at.from);
  }
}

void Machine::on(const Arrival& at, const SnapshotInfo& info) {
  if (!fetch_ || fetch_->id() != info.id || fetch_->parent() != at.from) return;
  set_fetch_info(at.now, info);
  for (const Uid& instance : std::exchange(children_info_, {})) send_snapshot(instance, info);
  finish_fetch_when_complete();
  pump_fetch(at.now);
}

// Before the description arrives, a child may know more chunks than this peer.
bool Machine::may_come(std::uint32_t chunk) const {
  const auto& info = fetch_->info();
  return info ? chunk < fetch_->chunks() : children_.size() < kChildrensChunks;
}

void Machine::on(const Arrival& at, const FetchChunk& fetch) {
  const auto held = held_.find(fetch.id);
  if (held != held_.end() && fetch.chunk < held->second.chunks()) {
    send_snapshot(at.from, Chunk{fetch.id, fetch.chunk}, {held->second.chunk(fetch.chunk)});
  } else if (!fetch_ || fetch_->id() != fetch.id) {
    send_snapshot(at.from, Gone{fetch.id});
  } else if (fetch_->has(fetch.chunk)) {
    send_snapshot(at.from, Chunk{fetch.id, fetch.chunk}, {fetch_->chunk(fetch.chunk)});
  } else if (view_->find(at.from) != nullptr && may_come(fetch.chunk)) {
    children_[fetch.chunk].insert(at.from);
  }
}

void Machine::on(const Arrival& at, const Chunk& chunk) {
  if (!fetch_ || fetch_->id() != chunk.id || at.parts.size() != 1) return;
  if (fetch_->chunk(at.now, at.from, chunk.chunk, at.parts[0])) give_chunk(chunk.chunk);
  if (fetch_->is_parent_useless()) return next_parent(at.now, at.from);
  finish_fetch_when_complete();
  pump_fetch(at.now);
}

void Machine::give_chunk(std::uint32_t chunk) {
  const auto waiting = children_.find(chunk);
  if (waiting == children_.end()) return;
  for (const Uid& instance : waiting->second) {
    send_snapshot(instance, Chunk{fetch_->id(), chunk}, {fetch_->chunk(chunk)});
  }
  children_.erase(waiting);
}

}  // namespace moolink::accumulate
