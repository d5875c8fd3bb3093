#include "collective/pipeline_segment.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/round_up.h"
#include "collective/passage.h"

namespace moolink::collective {
namespace {

constexpr std::uint64_t kMagic = 0x65706970'6b6c6f6d;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMaxWindowBytes = std::uint64_t{1} << 30;

struct Header {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint32_t ranks;
  std::uint32_t depth;
  std::uint64_t window_bytes;
};
static_assert(sizeof(Header) <= kCacheLine);

constexpr std::uint64_t kStatusBytes = 32;

std::uint64_t words_at(std::uint32_t rank) { return kCacheLine * (1 + std::uint64_t{rank}); }

// Room for the operations whose status some rank may still read: see status().
std::uint64_t statuses_stride(const PipelineLayout& layout) {
  return round_up(kStatusBytes * (layout.depth + 1), kCacheLine);
}

std::uint64_t windows_at(const PipelineLayout& layout) {
  return round_up(words_at(layout.ranks) + statuses_stride(layout) * layout.ranks, kPage);
}

}  // namespace

std::uint64_t PipelineSegment::bytes_of(const PipelineLayout& layout) {
  static_assert(sizeof(Words) == kCacheLine);
  static_assert(sizeof(Status) == kStatusBytes);
  const bool fits =
      layout.ranks != 0 && layout.ranks <= kMaxPipelineRanks && layout.depth != 0 &&
      layout.depth <= kMaxPipelineDepth && layout.window_bytes % kCacheLine == 0 &&
      layout.window_bytes <= kMaxWindowBytes &&
      layout.window_bytes >= kCacheLine * layout.ranks;  // a line for each rank's block
  if (!fits) {
    throw Exception(ErrorCode::invalid_argument,
                    "no segment for " + std::to_string(layout.ranks) + " ranks with " +
                        std::to_string(layout.depth) + " windows of " +
                        std::to_string(layout.window_bytes) + " bytes");
  }
  return windows_at(layout) + layout.window_bytes * layout.depth * layout.ranks;
}

void PipelineSegment::initialise(std::span<std::byte> segment, const PipelineLayout& layout) {
  if (segment.size() < bytes_of(layout)) {
    throw Exception(ErrorCode::invalid_argument, "a pipeline's segment is too small");
  }
  const Header header{kMagic, layout.epoch, layout.ranks, layout.depth, layout.window_bytes};
  std::memcpy(segment.data(), &header, sizeof header);
}

PipelineSegment::PipelineSegment(std::shared_ptr<void> owner, std::span<std::byte> segment,
                                 const PipelineLayout& layout)
    : owner_(std::move(owner)), segment_(segment.data()), layout_(layout) {
  Header header{};
  if (segment.size() >= bytes_of(layout)) {
    std::memcpy(&header, segment.data(), sizeof header);
  }
  const PipelineLayout theirs{header.epoch, header.ranks, header.depth, header.window_bytes};
  if (header.magic != kMagic || theirs != layout) {
    throw Exception(ErrorCode::wire,
                    "the segment that was passed for the operations of membership " +
                        std::to_string(layout.epoch) + " has another layout (membership " +
                        std::to_string(theirs.epoch) + ", " + std::to_string(theirs.ranks) +
                        " ranks)");
  }
}

PipelineSegment::Words& PipelineSegment::words(std::uint32_t rank) const {
  return *reinterpret_cast<Words*>(segment_ + words_at(rank));
}

// A rank has depth + 1 of them, and each operation has at least one chunk. So a rank begins
// operation s + depth + 1 after all ranks have taken all chunks of s, and each reads the statuses
// of s before that.
PipelineSegment::Status& PipelineSegment::status(std::uint32_t rank, std::uint64_t s) const {
  const std::uint64_t slot = s % (layout_.depth + 1);
  return *reinterpret_cast<Status*>(segment_ + words_at(layout_.ranks) +
                                    statuses_stride(layout_) * rank + kStatusBytes * slot);
}

std::byte* PipelineSegment::window(std::uint32_t rank, std::uint64_t chunk) const {
  const std::uint64_t index = std::uint64_t{rank} * layout_.depth + chunk % layout_.depth;
  return segment_ + windows_at(layout_) + layout_.window_bytes * index;
}

std::uint64_t PipelineSegment::least(Stage stage) const {
  std::uint64_t least = ~std::uint64_t{0};
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    least = std::min(least, words(rank).done[stage].load(std::memory_order_seq_cst));
  }
  return least;
}

bool PipelineSegment::is_left() const {
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (words(rank).left.load(std::memory_order_seq_cst) != 0) return true;
  }
  return false;
}

bool PipelineSegment::is_abandoned(std::uint64_t s) const {
  std::atomic_thread_fence(std::memory_order_acquire);  // after all that was read of its data
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (status(rank, s).given_up.load(std::memory_order_seq_cst) == s) return true;
  }
  return false;
}

}  // namespace moolink::collective
