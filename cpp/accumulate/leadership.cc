#include "accumulate/leadership.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/crash_point.h"
#include "base/format.h"

namespace moolink::accumulate {
namespace {

constexpr std::size_t kChildren = 2;  // of each holder of a snapshot, in the tree of newcomers

}  // namespace

// --- epochs --------------------------------------------------------------------------------------

void Leadership::leave_epoch() {
  if (leader_) {
    has_led_ = true;
    queued_ = leader_->queued();
  }
  leader_.reset();
  wants_state_.reset();
  shared_cuts_ = 0;
  watch_.leave_epoch();
}

void Leadership::activate(const Resume& resume) {
  watch_.activate();
  has_led_ = is_boundary_announced_ = false;
  queued_.clear();
  announced_stable_ = resume.round;
  if (!epoch_.is_leader()) return;
  std::map<Uid, Leader::Peer> peers;
  for (const MemberStatus& member : resume.members) {
    if (!member.refused.empty()) continue;
    const group::MemberInfo& info = *epoch_.view().find(member.instance);
    peers[member.instance] = {info.name, info.role == group::Role::observer,
                              member.status == StateStatus::complete,
                              member.status == StateStatus::stateless};
  }
  Leader::Config config;
  config.epoch = epoch_.number();
  config.round = resume.round;
  config.parallel_gradients = settings_.own().parallel_gradients;
  config.snapshot_gather = config_.snapshot_gather;
  leader_.emplace(config, peers);
  for (const MemberStatus& member : resume.members) {
    if (member.status == StateStatus::pending) leader_->awaits(member.instance, member.snapshot);
  }
  settings_.announce();
}

void Leadership::add_facts(Flush& flush) const {
  flush.led = has_led_;
  flush.queued = queued_;
  watch_.add_facts(flush);
}

// --- messages ------------------------------------------------------------------------------------

void Leadership::checksum(const Uid& from, const Checksum& checksum) {
  if (!leader_) return;
  auto differing = leader_->checksum(from, epoch_.self(), checksum);
  if (!differing.empty()) outbox_.broadcast(Diverged{checksum.round, std::move(differing)});
}

void Leadership::request_state(Time now, const Uid& from) {
  if (!leader_) return;
  for (const SnapshotId& id : leader_->request_state(now, from)) {
    outbox_.broadcast(SnapshotOver{id});
  }
}

void Leadership::snapshot_complete(const Uid& from, const SnapshotId& id) {
  if (leader_ && leader_->snapshot_complete(from, id)) outbox_.broadcast(SnapshotOver{id});
}

// --- rounds --------------------------------------------------------------------------------------

void Leadership::lead(Time now, std::uint64_t next) {
  if (!leader_) return;
  const std::uint64_t stable = leader_->stable();
  if (stable > announced_stable_) {
    announced_stable_ = stable;
    watch_.stable_moved();
    outbox_.broadcast(Stable{stable});
  }
  if (next == 0) {
    cut_rounds();
  } else if (stable == leader_->cut_round() && !std::exchange(is_boundary_announced_, true)) {
    outbox_.broadcast(Move{next});
  }
  promise_snapshot(now, next != 0);
  watch_.watch(*leader_, settings_.own().virtual_batch_size);
}

void Leadership::cut_rounds() {
  while (auto record = leader_->cut(settings_.own().virtual_batch_size)) {
    const bool is_shared = shared_epoch_ == epoch_.number();
    outbox_.broadcast(Cut{std::move(*record), is_shared ? ++shared_cuts_ : 0});
    crash_point("cut.sent");
  }
}

// --- the state for newcomers ---------------------------------------------------------------------

bool Leadership::is_state_promised() const {
  return leader_ && leader_->promised() && !leader_->promised()->captured;
}

bool Leadership::holds_results_back() const {
  return wants_state_ ||
         (is_state_promised() && ledger_.delivered() == leader_->promised()->id.version);
}

void Leadership::promise_snapshot(Time now, bool is_boundary_near) {
  // No promise at a near boundary: the next epoch's leader will make it.
  if (!is_boundary_near) {
    if (const auto id = leader_->promise(now)) {
      for (const Uid& instance : leader_->promised()->to) {
        outbox_.send(instance, SnapshotPromised{*id});
      }
    }
  }
  if (!is_state_promised() || wants_state_) return;
  const std::uint64_t version = leader_->promised()->id.version;
  // STABLE first: a newcomer's state must never be of a round that a survivor could lack.
  const bool at_version = ledger_.delivered() == version && leader_->stable() >= version;
  if (!at_version) return;
  if (!model_.is_installed()) return;
  wants_state_ = version;
  outbox_.wake();
}

bool Leadership::set_state(wire::Payload state) {
  if (!leader_ || !wants_state_) return false;  // the epoch changed meanwhile: it will ask again
  wants_state_.reset();
  const SnapshotId id = leader_->promised()->id;
  // Two promises of one version have one id: all receivers get the bytes that the first ones get.
  const HeldSnapshot* earlier = snapshots_.find(id);
  HeldSnapshot held =
      earlier != nullptr
          ? *earlier
          : HeldSnapshot(describe(id, config_.layout, state, config_.chunk_bytes), state);
  const auto is_here = [this](const Uid& to) {
    return epoch_.view().share_host(epoch_.self(), to);
  };
  if (!std::ranges::all_of(leader_->promised()->to, is_here)) held.add_checksums();
  const std::vector<Uid> receivers = leader_->captured();
  for (std::size_t i = 0; i < receivers.size(); ++i) {
    std::vector<Uid> parents{epoch_.self()};
    if (i >= kChildren) parents.insert(parents.begin(), receivers[(i - kChildren) / kChildren]);
    outbox_.send(receivers[i], SnapshotReady{held.info(), std::move(parents)});
    crash_point("snapshot.sent");
  }
  if (!receivers.empty()) snapshots_.hold(std::move(held));
  return true;
}

// --- human-readable ------------------------------------------------------------------------------

std::vector<Uid> Leadership::waiting_for() const {
  if (!leader_) return {};
  std::vector<Uid> lagging = leader_->without_oldest();
  return lagging.empty() ? leader_->blocked_by(settings_.own().virtual_batch_size) : lagging;
}

std::string Leadership::explain() const {
  const auto quoted = [this](const std::vector<Uid>& instances) {
    return group::joined(epoch_.names_of(instances), "'");
  };
  if (const auto lagging = leader_->without_oldest(); !lagging.empty()) {
    return quoted(lagging) + " to take part in the reduction of round " +
           std::to_string(leader_->stable() + 1) + ": is the process stopped, or the network slow?";
  }
  const auto blocking = leader_->blocked_by(settings_.own().virtual_batch_size);
  if (!blocking.empty()) {
    return quoted(blocking) +
           " to apply the rounds that are there: its loop must go on to the next turn of steps(), "
           "or call update(), step the optimiser and call zero_gradients()";
  }
  const auto idle = leader_->without_gradients();
  if (idle.empty()) return "more contributions: " + gathered() + ", from every member";
  return "contributions: " + gathered() + ", none of " + quoted(idle) +
         "; the loop must call reduce_gradients() (step.reduce() in steps())";
}

std::string Leadership::gathered() const {
  if (!leader_) return {};
  return "a batch of " + grouped(leader_->queued_batch()) + " of " +
         grouped(settings_.own().virtual_batch_size) + " for round " +
         std::to_string(leader_->cut_round() + 1) + " is here";
}

}  // namespace moolink::accumulate
