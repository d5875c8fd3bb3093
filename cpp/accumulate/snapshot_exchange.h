#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "accumulate/config.h"
#include "accumulate/outbox.h"

namespace moolink::accumulate {

// The bytes of snapshots: those held here, which it hands on, and at most one that it fetches from
// one parent after the other. Children that ask for a part of the snapshot being fetched wait until
// the part is here. Fenced by the snapshot's id: a transfer goes on over changes of epoch, until
// the snapshot is complete, given up with drop(), or without a parent. What the snapshot is for is
// StateTransfer's and Leadership's concern. Owned by the Machine.
class SnapshotExchange {
 public:
  struct Fetched {
    SnapshotId id;
    wire::Payload payload;
  };

  SnapshotExchange(const Config& config, const Epoch& epoch, Outbox& outbox)
      : config_(config), epoch_(epoch), outbox_(outbox) {}

  // --- the snapshots held here -------------------------------------------------------------------
  void hold(HeldSnapshot held) {
    const SnapshotId id = held.info().id;
    held_.insert_or_assign(id, std::move(held));
  }
  void release(const SnapshotId& id) { held_.erase(id); }
  void keep_only(const std::vector<SnapshotHolders>& awaited);
  const HeldSnapshot* find(const SnapshotId& id) const;
  std::vector<SnapshotId> held() const;

  // --- the fetch ---------------------------------------------------------------------------------
  void fetch(const SnapshotId& id) { fetch_.emplace(id, config_.memory, config_.snapshot_timeout); }
  bool fetches(const SnapshotId& id) const { return fetch_ && fetch_->id() == id; }
  // Throws Exception{wire} for an inconsistent description.
  void set_info(Time now, const SnapshotInfo& info);
  void set_parents(Time now, const SnapshotId& id, const std::vector<Uid>& parents);
  void drop();
  // False: the last parent is gone.
  [[nodiscard]] bool watch(Time now);
  // Once, when all of it is here; it is held from then on.
  std::optional<Fetched> finish();
  std::size_t fetched_bytes() const { return fetched_bytes_; }
  Time next_deadline() const { return fetch_ ? fetch_->deadline() : kNever; }

  // A message of service 5. False: the last parent is gone. Throws as set_info().
  [[nodiscard]] bool received(Time now, const Uid& from, const Outbox::SnapshotMessage& message,
                              const std::vector<Buffer>& parts);

 private:
  bool on(const Arrival& at, const FetchInfo& fetch);
  bool on(const Arrival& at, const SnapshotInfo& info);
  bool on(const Arrival& at, const FetchChunk& fetch);
  bool on(const Arrival& at, const Chunk& chunk);
  bool on(const Arrival& at, const Gone& gone) {
    return !fetches(gone.id) || next_parent(at.now, at.from);
  }
  void pump(Time now);
  bool next_parent(Time now, const Uid& parent);
  bool may_come(std::uint32_t chunk) const;
  void give_chunk(std::uint32_t chunk);

  const Config& config_;
  const Epoch& epoch_;
  Outbox& outbox_;
  std::map<SnapshotId, HeldSnapshot> held_;
  std::optional<SnapshotFetch> fetch_;
  std::map<std::uint32_t, std::set<Uid>> children_;  // members that wait for a chunk of fetch_
  std::set<Uid> children_info_;                      // or for its description
  std::size_t fetched_bytes_ = 0;                    // of the snapshot that was fetched last
};

}  // namespace moolink::accumulate
