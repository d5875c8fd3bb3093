#include "accumulate/snapshot.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/limits.h"
#include "wire/crc32c.h"

namespace moolink::accumulate {
namespace {

constexpr std::size_t kRequestsUnderWay = 4;
constexpr std::uint32_t kMisfits = 8;  // more misfits are no accident

}  // namespace

std::size_t total_bytes(const SnapshotInfo& info) {
  return std::accumulate(info.segments.begin(), info.segments.end(), std::size_t{0});
}

std::vector<ChunkPlace> chunk_places(const SnapshotInfo& info) {
  std::vector<ChunkPlace> places;
  for (std::size_t segment = 0; segment < info.segments.size(); ++segment) {
    const std::uint64_t size = info.segments[segment];
    for (std::uint64_t offset = 0; offset < size; offset += info.chunk_bytes) {
      places.push_back({segment, offset, std::min<std::uint64_t>(info.chunk_bytes, size - offset)});
    }
  }
  return places;
}

SnapshotInfo describe(const SnapshotId& id, std::uint64_t layout, const wire::Payload& payload,
                      std::uint32_t chunk_bytes) {
  SnapshotInfo info{id, layout, chunk_bytes, {payload.body.size()}, {}};
  for (const Buffer& part : payload.parts) info.segments.push_back(part.size());
  return info;
}

HeldSnapshot::HeldSnapshot(SnapshotInfo info, wire::Payload payload)
    : info_(std::move(info)), payload_(std::move(payload)), places_(chunk_places(info_)) {}

void HeldSnapshot::add_checksums() {
  if (!info_.crc32c.empty()) return;
  std::vector<std::uint32_t> checksums;
  for (std::size_t index = 0; index < chunks(); ++index) {
    checksums.push_back(wire::crc32c(chunk(index).span()));
  }
  info_.crc32c = std::move(checksums);  // all or nothing
}

Buffer HeldSnapshot::chunk(std::size_t index) const {
  const ChunkPlace& place = places_.at(index);
  const Buffer& segment = place.segment == 0 ? payload_.body : payload_.parts[place.segment - 1];
  return segment.slice(place.offset, place.bytes);
}

void SnapshotFetch::set_info(Time now, const SnapshotInfo& info) {
  if (info_ || info.id != id_) return;
  const Limits limits;
  if (info.segments.size() > limits.max_parts + 1) {
    throw Exception(ErrorCode::wire, "a snapshot's description has too many parts");
  }
  std::uint64_t total = 0;
  std::uint64_t chunks = 0;
  for (const std::uint64_t bytes : info.segments) {
    if (info.chunk_bytes == 0 || bytes > limits.max_message - total) {
      throw Exception(ErrorCode::wire, "a snapshot's description is larger than a message may be");
    }
    total += bytes;
    chunks += (bytes + info.chunk_bytes - 1) / info.chunk_bytes;
  }
  const std::uint64_t most = limits.max_message / kChunkBytes + info.segments.size();
  if (info.segments.empty() || chunks > most ||
      (!info.crc32c.empty() && chunks != info.crc32c.size())) {
    throw Exception(ErrorCode::wire, "a snapshot's description does not fit its chunks");
  }
  // All or nothing: the allocation may fail.
  std::vector<ChunkPlace> places = chunk_places(info);
  std::vector<MutableBuffer> segments;
  for (const std::uint64_t bytes : info.segments) segments.push_back(memory_->allocate(bytes));
  std::vector<bool> have(places.size(), false);
  info_ = info;
  places_ = std::move(places);
  segments_ = std::move(segments);
  have_ = std::move(have);
  missing_ = places_.size();
  deadline_ = now + timeout_;
}

void SnapshotFetch::set_parents(Time now, std::vector<Uid> parents) {
  parents_ = std::move(parents);
  start_over(now);
}

void SnapshotFetch::start_over(Time now) {
  asked_.clear();
  asked_info_ = false;
  misfits_ = 0;
  deadline_ = parents_.empty() ? kNever : now + timeout_;
}

bool SnapshotFetch::give_up(Time now, const Uid& parent) {
  if (parents_.empty() || parents_.front() != parent) return true;
  parents_.erase(parents_.begin());
  start_over(now);
  return !parents_.empty();
}

bool SnapshotFetch::is_parent_useless() const { return misfits_ >= kMisfits; }

bool SnapshotFetch::chunk(Time now, const Uid& from, std::uint32_t index, const Buffer& bytes) {
  asked_.erase(index);
  if (!info_ || index >= places_.size() || have_[index]) return false;
  const ChunkPlace& place = places_[index];
  // The sender may still write its memory: the checksum must be of the bytes that are kept.
  const MutableBuffer mine = segments_[place.segment].slice(place.offset, place.bytes);
  const bool fits = bytes.size() == place.bytes;
  if (fits) std::memcpy(mine.data(), bytes.data(), bytes.size());
  const bool is_checked = !info_->crc32c.empty();
  if (!fits || (is_checked && wire::crc32c(mine.span()) != info_->crc32c[index])) {
    if (parent() == from) ++misfits_;
    return false;
  }
  have_[index] = true;
  --missing_;
  deadline_ = now + timeout_;
  return true;
}

Buffer SnapshotFetch::chunk(std::uint32_t index) const {
  const ChunkPlace& place = places_.at(index);
  return Buffer(segments_[place.segment]).slice(place.offset, place.bytes);
}

std::vector<SnapshotFetch::Request> SnapshotFetch::next_requests(Time now) {
  std::vector<Request> requests;
  if (parents_.empty()) return requests;
  if (!info_) {
    if (!std::exchange(asked_info_, true)) requests.push_back({parents_.front(), FetchInfo{id_}});
    return requests;
  }
  for (std::uint32_t i = 0; i < have_.size() && asked_.size() < kRequestsUnderWay; ++i) {
    if (have_[i] || asked_.contains(i)) continue;
    if (asked_.empty()) deadline_ = now + timeout_;
    asked_.insert(i);
    requests.push_back({parents_.front(), FetchChunk{id_, i}});
  }
  return requests;
}

HeldSnapshot SnapshotFetch::finish() const {
  wire::Payload payload;
  payload.body = segments_.front();
  payload.parts.assign(segments_.begin() + 1, segments_.end());
  return {*info_, std::move(payload)};
}

}  // namespace moolink::accumulate
