#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "accumulate/messages.h"
#include "base/buffer.h"
#include "base/time.h"
#include "base/uid.h"
#include "wire/payload.h"

namespace moolink::accumulate {

inline constexpr std::uint32_t kChunkBytes = 1u << 20;

// Describes a payload as a snapshot.
SnapshotInfo describe(const SnapshotId& id, std::uint64_t layout, const wire::Payload& payload,
                      std::uint32_t chunk_bytes);

std::size_t total_bytes(const SnapshotInfo& info);

// The position of a chunk: segment, offset, bytes.
struct ChunkPlace {
  std::size_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
std::vector<ChunkPlace> chunk_places(const SnapshotInfo& info);

// A complete snapshot to hand on.
class HeldSnapshot {
 public:
  HeldSnapshot(SnapshotInfo info, wire::Payload payload);

  const SnapshotInfo& info() const { return info_; }
  // From now on, info() has a checksum of each chunk. The first call reads all chunks.
  void add_checksums();
  const wire::Payload& payload() const { return payload_; }
  std::size_t chunks() const { return places_.size(); }
  Buffer chunk(std::size_t index) const;

 private:
  SnapshotInfo info_;
  wire::Payload payload_;
  std::vector<ChunkPlace> places_;
};

// The transfer of one snapshot to a newcomer: it asks the first parent for chunks, a few at a time,
// and the next parent when that one leaves or does not answer for a while.
class SnapshotFetch {
 public:
  struct Request {
    Uid parent;
    std::variant<FetchInfo, FetchChunk> message;
  };

  SnapshotFetch(SnapshotId id, std::shared_ptr<Allocator> memory, Duration timeout)
      : id_(id), memory_(std::move(memory)), timeout_(timeout) {}

  const SnapshotId& id() const { return id_; }
  const std::optional<SnapshotInfo>& info() const { return info_; }
  // Throws Exception{wire} for an inconsistent description.
  void set_info(Time now, const SnapshotInfo& info);
  void set_parents(Time now, std::vector<Uid> parents);
  // The parent is gone or has nothing: use the next one. False when there is none.
  bool give_up(Time now, const Uid& parent);
  // True when the chunk was new and whole. Asks again for a chunk that does not fit the
  // description.
  bool chunk(Time now, const Uid& from, std::uint32_t index, const Buffer& bytes);
  // The parent has sent so many misfits that it may never send anything else.
  bool is_parent_useless() const;
  bool has(std::uint32_t index) const { return index < have_.size() && have_[index]; }
  Buffer chunk(std::uint32_t index) const;

  std::size_t chunks() const { return places_.size(); }  // 0 without a description
  std::vector<Request> next_requests(Time now);
  Time deadline() const { return deadline_; }
  const std::optional<Uid> parent() const {
    return parents_.empty() ? std::optional<Uid>() : parents_.front();
  }
  bool complete() const { return info_ && missing_ == 0; }
  HeldSnapshot finish() const;

 private:
  void start_over(Time now);

  SnapshotId id_;
  std::shared_ptr<Allocator> memory_;
  Duration timeout_;
  std::optional<SnapshotInfo> info_;
  std::vector<ChunkPlace> places_;
  std::vector<MutableBuffer> segments_;
  std::vector<bool> have_;
  std::size_t missing_ = 0;
  std::vector<Uid> parents_;
  std::set<std::uint32_t> asked_;
  bool asked_info_ = false;
  std::uint32_t misfits_ = 0;  // chunks of the parent
  Time deadline_ = kNever;
};

}  // namespace moolink::accumulate
