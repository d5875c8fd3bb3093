#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/at_fork.h"
#include "base/buffer.h"
#include "memory/segment.h"

namespace moolink::memory {

// Memory of this process that peers of its host may map for reading: arrays in it are lent without
// a copy. Blocks are 64-byte aligned, may be freed on any thread, and are reused warm.
//
// Shared memory stays shared over a fork: parent and child both have the blocks that were in use.
// They are never reused, because the child may use them for as long as it lives. The child's pool
// allocates nothing.
class LendingPool final : public Allocator,
                          public AtFork,
                          public std::enable_shared_from_this<LendingPool> {
 public:
  LendingPool() { join_forks(Rank::memory); }
  ~LendingPool() override { leave_forks(Rank::memory); }

  struct Place {
    std::uint64_t segment = 0;  // from 1; never used twice
    std::size_t offset = 0;
  };

  static constexpr std::size_t kSmallestBlock = std::size_t{4} << 10;
  static constexpr std::size_t kLargestBlock = std::size_t{1} << 40;
  static constexpr std::size_t kSegmentBytes = std::size_t{64} << 20;  // shared by small blocks
  // Free large blocks beyond this total are returned to the system.
  static constexpr std::size_t kMaxFreeBytes = std::size_t{512} << 20;

  MutableBuffer allocate(std::size_t size) override;  // throws std::bad_alloc

  // For a block size that is needed again and again: while the token lives, the pool keeps one more
  // free block of it, also beyond kMaxFreeBytes. Throws std::bad_alloc.
  std::shared_ptr<void> keep_one(std::size_t size);

  // The place of these bytes in the pool; empty: not in one of its segments.
  std::optional<Place> find(const std::byte* data, std::size_t size) const;
  // Null: retired, or never made.
  std::shared_ptr<Segment> segment(std::uint64_t number) const;
  // Rises whenever a segment is retired.
  std::uint64_t retired() const { return retired_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    std::shared_ptr<Segment> segment;
    std::size_t block_bytes = 0;
    std::size_t in_use = 0;  // blocks
    bool forked = false;
  };
  using Segments = std::map<std::uint64_t, Entry>;

  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override;
  std::pair<Place, std::byte*> take(std::size_t block_bytes);
  void add_segment(std::size_t block_bytes);
  void release(const Place& block);
  void retire(Segments::iterator segment);
  std::size_t surplus(std::size_t block_bytes) const;
  void retire_surplus();

  mutable std::mutex mutex_;
  std::atomic<std::uint64_t> retired_{0};
  bool abandoned_ = false;
  std::uint64_t last_segment_ = 0;
  Segments segments_;
  std::map<const std::byte*, std::uint64_t> by_address_;  // of the segments' first bytes
  std::map<std::size_t, std::vector<Place>> free_;        // by block size, the warmest last
  std::map<std::size_t, std::size_t> kept_;               // tokens, by block size
};

}  // namespace moolink::memory
