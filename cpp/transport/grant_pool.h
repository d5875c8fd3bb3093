#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/at_fork.h"
#include "base/buffer.h"
#include "memory/segment.h"
#include "wire/path.h"

namespace moolink::transport {

// The memory that one peer may fill, in segments made here and passed to that peer only. A block is
// reused when its buffer was released, which keeps its pages warm (copies to fresh ones are ten
// times slower). After the connection has ended no block is ever reused: the peer may be stopped in
// the middle of a copy and continue years later.
//
// A fork makes the segments with blocks in use private: each side may write its arrays, and none of
// their blocks is reused, because a child may read them for as long as it lives. Only pages written
// afterwards are copied.
class GrantPool final : public AtFork, public std::enable_shared_from_this<GrantPool> {
 public:
  GrantPool() { join_forks(Rank::memory); }
  ~GrantPool() { leave_forks(Rank::memory); }

  struct Block {
    wire::GrantPlace place;
    MutableBuffer memory;  // its release, on any thread, returns the block
  };

  static constexpr std::size_t kSmallestBlock = std::size_t{64} << 10;
  static constexpr std::size_t kLargestBlock = std::size_t{1} << 36;
  static constexpr std::size_t kSegmentBytes = std::size_t{4} << 20;  // shared by small blocks
  // Free blocks beyond this total are returned to the system.
  static constexpr std::size_t kMaxFreeBytes = std::size_t{256} << 20;

  // nullopt: too large, or the system has no memory.
  std::optional<Block> allocate(std::size_t bytes);
  // Returns to the system the memory unused since the last call. False: nothing is left that a
  // later call could return.
  bool retire_idle();
  // Null: the segment is retired, or was never made.
  std::shared_ptr<memory::Segment> segment(std::uint64_t number);
  // Rises whenever a segment is retired.
  std::uint64_t retired() const { return retired_.load(std::memory_order_relaxed); }
  // The connection has ended.
  void close();

 private:
  struct SegmentEntry {
    std::shared_ptr<memory::Segment> segment;
    std::size_t block_bytes;
    std::size_t in_use = 0;  // blocks
    bool forked = false;
    bool is_private = false;
  };
  using Segments = std::map<std::uint64_t, SegmentEntry>;
  struct FreeBlock {
    std::uint64_t segment;
    std::size_t offset;
  };

  struct InUse;

  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override;
  void withhold(std::uint64_t segment, std::size_t block_bytes);
  void end();
  void add_segment(std::size_t block_bytes);
  void release(const FreeBlock& block);
  void retire_surplus();
  void retire_coldest(std::size_t block_bytes, std::vector<FreeBlock>& blocks);

  std::mutex mutex_;  // buffers are released on any thread
  std::atomic<std::uint64_t> retired_{0};
  bool closed_ = false;
  std::uint64_t last_grant_ = 0;
  std::uint64_t last_segment_ = 0;
  std::size_t free_bytes_ = 0;
  Segments segments_;                                   // after the end those with blocks in use
  std::map<std::size_t, std::vector<FreeBlock>> free_;  // by block size, the warmest last
  std::map<std::size_t, std::size_t> idle_;             // by block size: as many were always free
};

}  // namespace moolink::transport
