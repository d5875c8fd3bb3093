#include "accumulate/snapshot_exchange.h"

#include <algorithm>
#include <utility>
#include <variant>

namespace moolink::accumulate {
namespace {

constexpr std::size_t kChildrensChunks = 1024;  // requested before they are known to exist

}  // namespace

// --- the snapshots held here ---------------------------------------------------------------------

void SnapshotExchange::keep_only(const std::vector<SnapshotHolders>& awaited) {
  std::erase_if(held_, [&](const auto& item) {
    return std::ranges::find(awaited, item.first, &SnapshotHolders::id) == awaited.end();
  });
}

const HeldSnapshot* SnapshotExchange::find(const SnapshotId& id) const {
  const auto held = held_.find(id);
  return held == held_.end() ? nullptr : &held->second;
}

std::vector<SnapshotId> SnapshotExchange::held() const {
  std::vector<SnapshotId> ids;
  for (const auto& [id, held] : held_) ids.push_back(id);
  return ids;
}

// --- the fetch -----------------------------------------------------------------------------------

void SnapshotExchange::set_info(Time now, const SnapshotInfo& info) {
  fetch_->set_info(now, info);
  fetched_bytes_ = total_bytes(info);
}

void SnapshotExchange::set_parents(Time now, const SnapshotId& id,
                                   const std::vector<Uid>& parents) {
  if (!fetches(id)) return;
  fetch_->set_parents(now, parents);
  pump(now);
}

void SnapshotExchange::drop() {
  if (!fetch_) return;
  const SnapshotId id = fetch_->id();
  fetch_.reset();
  std::set<Uid> waiting = std::exchange(children_info_, {});
  for (const auto& [chunk, instances] : std::exchange(children_, {})) {
    waiting.insert(instances.begin(), instances.end());
  }
  for (const Uid& instance : waiting) outbox_.send_snapshot(instance, Gone{id});
}

bool SnapshotExchange::watch(Time now) {
  if (!fetch_ || now < fetch_->deadline() || !fetch_->parent()) return true;
  return next_parent(now, *fetch_->parent());
}

std::optional<SnapshotExchange::Fetched> SnapshotExchange::finish() {
  if (!fetch_ || !fetch_->complete()) return {};
  HeldSnapshot held = fetch_->finish();
  Fetched fetched{fetch_->id(), held.payload()};
  hold(std::move(held));
  drop();
  return fetched;
}

void SnapshotExchange::pump(Time now) {
  for (auto& request : fetch_->next_requests(now)) {
    std::visit([&](const auto& message) { outbox_.send_snapshot(request.parent, message); },
               request.message);
  }
}

bool SnapshotExchange::next_parent(Time now, const Uid& parent) {
  if (!fetch_->give_up(now, parent)) return false;
  pump(now);
  return true;
}

// --- messages ------------------------------------------------------------------------------------

bool SnapshotExchange::received(Time now, const Uid& from, const Outbox::SnapshotMessage& message,
                                const std::vector<Buffer>& parts) {
  const Arrival arrival{now, from, parts};
  return std::visit([&](const auto& it) { return on(arrival, it); }, message);
}

bool SnapshotExchange::on(const Arrival& at, const FetchInfo& fetch) {
  if (const auto held = held_.find(fetch.id); held != held_.end()) {
    if (!epoch_.view().share_host(epoch_.self(), at.from)) held->second.add_checksums();
    outbox_.send_snapshot(at.from, held->second.info());
  } else if (!fetches(fetch.id)) {
    outbox_.send_snapshot(at.from, Gone{fetch.id});
  } else if (fetch_->info()) {
    outbox_.send_snapshot(at.from, *fetch_->info());
  } else {
    children_info_.insert(at.from);
  }
  return true;
}

bool SnapshotExchange::on(const Arrival& at, const SnapshotInfo& info) {
  if (!fetches(info.id) || fetch_->parent() != at.from) return true;
  set_info(at.now, info);
  for (const Uid& instance : std::exchange(children_info_, {})) {
    outbox_.send_snapshot(instance, info);
  }
  pump(at.now);
  return true;
}

// Before the description arrives, a child may know more chunks than this peer.
bool SnapshotExchange::may_come(std::uint32_t chunk) const {
  return fetch_->info() ? chunk < fetch_->chunks() : children_.size() < kChildrensChunks;
}

bool SnapshotExchange::on(const Arrival& at, const FetchChunk& fetch) {
  const HeldSnapshot* held = find(fetch.id);
  if (held != nullptr && fetch.chunk < held->chunks()) {
    outbox_.send_snapshot(at.from, Chunk{fetch.id, fetch.chunk}, {held->chunk(fetch.chunk)});
  } else if (!fetches(fetch.id)) {
    outbox_.send_snapshot(at.from, Gone{fetch.id});
  } else if (fetch_->has(fetch.chunk)) {
    outbox_.send_snapshot(at.from, Chunk{fetch.id, fetch.chunk}, {fetch_->chunk(fetch.chunk)});
  } else if (epoch_.view().find(at.from) != nullptr && may_come(fetch.chunk)) {
    children_[fetch.chunk].insert(at.from);
  }
  return true;
}

bool SnapshotExchange::on(const Arrival& at, const Chunk& chunk) {
  if (!fetches(chunk.id) || at.parts.size() != 1) return true;
  if (fetch_->chunk(at.now, at.from, chunk.chunk, at.parts[0])) give_chunk(chunk.chunk);
  if (fetch_->is_parent_useless()) return next_parent(at.now, at.from);
  pump(at.now);
  return true;
}

void SnapshotExchange::give_chunk(std::uint32_t chunk) {
  const auto waiting = children_.find(chunk);
  if (waiting == children_.end()) return;
  for (const Uid& instance : waiting->second) {
    outbox_.send_snapshot(instance, Chunk{fetch_->id(), chunk}, {fetch_->chunk(chunk)});
  }
  children_.erase(waiting);
}

}  // namespace moolink::accumulate
