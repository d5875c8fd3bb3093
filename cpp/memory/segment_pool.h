#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/at_fork.h"
#include "base/buffer.h"
#include "memory/segment.h"

namespace moolink::memory {

// Blocks of memory that other processes of the host map: segments made here, each divided into
// blocks of one size. A block may be freed on any thread, which allocates nothing, and is reused
// warm (copies to fresh pages are ten times slower).
//
// The blocks in use at a fork are never reused, because the child may use them for as long as it
// lives. Nor are the free blocks of their segments, which are retired as a whole. The child's pool
// allocates nothing.
class SegmentPool : public AtFork, public std::enable_shared_from_this<SegmentPool> {
 public:
  struct Place {
    std::uint64_t segment = 0;  // from 1; never used twice
    std::size_t offset = 0;
  };

  // Null: retired, or never made.
  std::shared_ptr<Segment> segment(std::uint64_t number) const;
  // Rises whenever a segment is retired.
  std::uint64_t retired() const { return retired_.load(std::memory_order_relaxed); }
  // Returns to the system the memory unused since the last call. False: nothing is left that a
  // later call could return.
  bool retire_idle();
  // From now on no block is allocated or reused.
  void close();

 protected:
  struct Settings {
    std::size_t smallest_block;
    std::size_t largest_block;
    std::size_t segment_bytes;  // shared by smaller blocks
    std::size_t max_free;       // bytes of free large blocks; those beyond are returned
    const char* label;
    // True: other processes only read the segments, and a child shares them. False: other processes
    // write to them; a fork makes those in use private, and copies only pages written afterwards.
    bool lent;
  };
  struct Block {
    Place place;
    MutableBuffer memory;  // its release returns the block
  };
  // The blocks of one size.
  struct Size {
    std::vector<Place> free{};  // the warmest last
    std::size_t idle = 0;       // the number that was always free since retire_idle()
    std::size_t kept = 0;       // the number that does not count as free memory
  };

  struct Extent {
    std::uint64_t segment;
    std::size_t bytes;
  };

  explicit SegmentPool(const Settings& settings) : settings_(settings) { join_forks(Rank::memory); }
  ~SegmentPool() { leave_forks(Rank::memory); }

  std::size_t block_size(std::size_t bytes) const;
  // Throws std::bad_alloc, or Exception if the system refuses or the pool is closed.
  Block take(std::size_t bytes);
  // Needs the lock.
  void retire_surplus();

  mutable std::mutex mutex_;
  std::map<std::size_t, Size> sizes_;              // by the bytes of a block
  std::map<const std::byte*, Extent> by_address_;  // of the segments' first bytes

 private:
  struct Entry {
    std::shared_ptr<Segment> segment;
    std::size_t block_bytes;
    std::size_t in_use = 0;  // blocks
    bool forked = false;
    bool is_private = false;
  };
  using Segments = std::map<std::uint64_t, Entry>;

  void before_fork() noexcept final;
  void after_fork_in_parent() noexcept final { mutex_.unlock(); }
  void after_fork_in_child() noexcept final;
  void add_segment(std::size_t block_bytes);
  void release(const Place& block);
  Segments::iterator retire(Segments::iterator segment);
  void retire_coldest(Size& size);
  void end();

  const Settings settings_;
  std::atomic<std::uint64_t> retired_{0};
  bool closed_ = false;
  std::uint64_t last_segment_ = 0;
  Segments segments_;  // after end(): those with blocks in use
};

}  // namespace moolink::memory
