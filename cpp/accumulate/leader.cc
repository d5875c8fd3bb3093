#include "accumulate/leader.h"

#include <algorithm>
#include <utility>

namespace moolink::accumulate {
namespace {

constexpr std::size_t kChecksumRounds = 16;  // remembered while members report them
// Of one member, in no round yet: 100,000 statistics without counters, and as many gradients.
constexpr std::size_t kQueuedBytes = std::size_t{16} << 20;
constexpr std::int64_t kQueuedBatch = std::int64_t{1} << 48;
// Between two snapshots for one member: each makes it keep all results from the next round on.
constexpr Duration kPromiseAgain = seconds(1);

// Empty if no member that follows the protocol can have sent it.
std::optional<std::size_t> bytes_of(const Offer& offer) {
  if (offer.batch < 0 || offer.batch > kLargestBatch) return {};
  if (offer.counters.size() > kMostCounters) return {};
  std::size_t bytes = sizeof(Contribution);
  for (const auto& [name, value] : offer.counters) {
    if (name.size() > kLongestCounterName) return {};
    bytes += name.size() + sizeof(Counters::value_type);
  }
  return bytes;
}

}  // namespace

Leader::Leader(Config config, const std::map<Uid, Peer>& peers)
    : config_(config), cut_(config.round) {
  // Until its first HAVE a member with the state counts as one with full result slots.
  const std::uint64_t slots = std::uint64_t{config.parallel_gradients} + 1;
  const std::uint64_t least = config.round - std::min(config.round, slots);
  for (const auto& [instance, peer] : peers) {
    members_.emplace(instance, Member{peer, config.round, least, peer.complete, 0});
  }
}

void Leader::offer(const Uid& from, const Offer& offer) {
  const auto member = members_.find(from);
  if (member == members_.end() || member->second.peer.observer) return;
  const std::optional<std::size_t> bytes = bytes_of(offer);
  if (!bytes || offer.k <= member->second.last_k) return;
  Queue& queue = member->second.queue(offer.batch);
  if (*bytes > kQueuedBytes - queue.bytes || offer.batch > kQueuedBatch - queue.batch) return;
  // First, because the allocation may fail.
  queue_.push_back({{from, member->second.peer.name, offer.k, offer.batch, offer.version},
                    offer.counters,
                    *bytes});
  member->second.last_k = offer.k;
  queue.bytes += *bytes;
  queue.batch += offer.batch;
  queued_batch_ += offer.batch;
}

void Leader::have(const Uid& from, const Have& have) {
  const auto member = members_.find(from);
  if (member == members_.end()) return;
  member->second.have = std::max(member->second.have, have.have);
  member->second.delivered = std::max(member->second.delivered, have.delivered);
  member->second.keeps_up = have.keeps_up;
}

bool Leader::is_full(const Member& member) const {
  const std::uint64_t slots = std::uint64_t{config_.parallel_gradients} + 1;
  return member.keeps_up && !member.peer.observer && cut_ + 1 > member.delivered + slots;
}

std::optional<RoundRecord> Leader::cut(std::int64_t virtual_batch_size) {
  if (!enough(virtual_batch_size) || cut_ - stable() >= config_.parallel_gradients) return {};
  for (const auto& [instance, member] : members_) {
    if (is_full(member)) return {};
  }
  RoundRecord record;
  record.round = ++cut_;
  record.epoch = config_.epoch;
  while (record.total < virtual_batch_size) {
    Queued& next = queue_.front();
    Queue& queue = members_.at(next.contribution.instance).queue(next.contribution.batch);
    queue.bytes -= next.bytes;
    queue.batch -= next.contribution.batch;
    record.total += next.contribution.batch;
    for (const auto& [name, value] : next.counters) record.counters[name].add(value);
    record.contributions.push_back(std::move(next.contribution));
    queue_.pop_front();
  }
  queued_batch_ -= record.total;
  return record;
}

// Leaves out observers, for which no round waits.
template <class Which>
std::vector<Uid> Leader::those(const Which& which) const {
  std::vector<Uid> instances;
  for (const auto& [instance, member] : members_) {
    if (!member.peer.observer && which(member)) instances.push_back(instance);
  }
  return instances;
}

std::vector<Uid> Leader::blocked_by(std::int64_t virtual_batch_size) const {
  if (!enough(virtual_batch_size)) return {};
  return those([this](const Member& member) { return is_full(member); });
}

std::vector<Uid> Leader::without_gradients() const {
  return those([](const Member& member) { return member.gradients.batch == 0; });
}

std::vector<Uid> Leader::without_oldest() const {
  const std::uint64_t have = stable();
  if (have == cut_) return {};
  return those([have](const Member& member) { return member.have == have; });
}

std::uint64_t Leader::stable() const {
  std::uint64_t stable = cut_;
  for (const auto& [instance, member] : members_) {
    if (!member.peer.observer) stable = std::min(stable, member.have);
  }
  return stable;
}

std::vector<Contribution> Leader::queued() const {
  std::vector<Contribution> queued;
  for (const Queued& next : queue_) queued.push_back(next.contribution);
  return queued;
}

std::vector<SnapshotId> Leader::request_state(Time now, const Uid& from) {
  std::vector<SnapshotId> over;
  if (!members_.contains(from)) return over;
  for (auto& [id, waiting] : awaited_) {
    if (waiting.erase(from) > 0 && waiting.empty()) over.push_back(id);
  }
  for (const SnapshotId& id : over) awaited_.erase(id);
  if (promise_) std::erase(promise_->to, from);
  if (requests_.empty()) first_request_ = now;
  requests_.insert(from);
  return over;
}

std::optional<Time> Leader::promise_due() const {
  const bool busy = promise_ && !promise_->captured;
  if (requests_.empty() || busy) return {};
  Time due = first_request_ + config_.snapshot_gather;
  for (const Uid& instance : requests_) due = std::max(due, members_.at(instance).next_promise);
  return due;
}

std::optional<SnapshotId> Leader::promise(Time now) {
  const auto due = promise_due();
  if (!due) return {};
  std::size_t in_need = 0;
  for (const auto& [instance, member] : members_) in_need += member.peer.in_need ? 1 : 0;
  const bool has_just_had_one = *due > first_request_ + config_.snapshot_gather;
  if (*due > now && (requests_.size() < in_need || has_just_had_one)) return {};
  for (const Uid& instance : requests_) members_.at(instance).next_promise = now + kPromiseAgain;
  promise_ = Promise{{config_.epoch, cut_}, {requests_.begin(), requests_.end()}, false};
  requests_.clear();
  return promise_->id;
}

std::vector<Uid> Leader::captured() {
  promise_->captured = true;
  for (const Uid& instance : promise_->to) {
    awaits(instance, promise_->id);
    members_.at(instance).peer.in_need = false;
  }
  return promise_->to;
}

bool Leader::snapshot_complete(const Uid& from, const SnapshotId& id) {
  const auto awaited = awaited_.find(id);
  if (awaited == awaited_.end()) return false;
  awaited->second.erase(from);
  if (!awaited->second.empty()) return false;
  awaited_.erase(awaited);
  return true;
}

std::vector<Uid> Leader::checksum(const Uid& from, const Uid& self, const Checksum& checksum) {
  std::vector<Uid> differing;
  // Checksums of future rounds, which no member can have, would push out those of past rounds.
  if (!members_.contains(from) || checksum.round > cut_) return differing;
  auto& known = checksums_[checksum.round];
  known[from] = checksum.value;
  while (checksums_.size() > kChecksumRounds) checksums_.erase(checksums_.begin());
  const auto own = known.find(self);
  if (own == known.end()) return differing;
  for (const auto& [instance, value] : known) {
    // Only differences that this report revealed, so that each is reported once.
    if (value != own->second && (instance == from || from == self)) {
      differing.push_back(instance);
    }
  }
  return differing;
}

}  // namespace moolink::accumulate
