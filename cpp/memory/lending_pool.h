#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "base/buffer.h"
#include "memory/segment_pool.h"

namespace moolink::memory {

// Memory of this process that peers of its host may map for reading: arrays in it are lent without
// a copy. Shared memory stays shared over a fork: parent and child both have the blocks that were
// in use.
class LendingPool final : public Allocator, public SegmentPool {
 public:
  static constexpr std::size_t kSmallestBlock = std::size_t{4} << 10;
  static constexpr std::size_t kLargestBlock = std::size_t{1} << 40;
  static constexpr std::size_t kSegmentBytes = std::size_t{64} << 20;
  static constexpr std::size_t kMaxFreeBytes = std::size_t{512} << 20;

  LendingPool()
      : SegmentPool({.smallest_block = kSmallestBlock,
                     .largest_block = kLargestBlock,
                     .segment_bytes = kSegmentBytes,
                     .max_free = kMaxFreeBytes,
                     .label = "moolink-lending",
                     .lent = true}) {}

  MutableBuffer allocate(std::size_t size) override;  // throws std::bad_alloc
  // For a block size that is needed again and again: while the token lives, the pool keeps one more
  // free block of it, also beyond kMaxFreeBytes. Throws std::bad_alloc.
  std::shared_ptr<void> keep_one(std::size_t size);
  // The place of these bytes in the pool; empty: not in one of its segments.
  std::optional<Place> find(const std::byte* data, std::size_t size) const;
};

}  // namespace moolink::memory
