#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <span>

#include "base/at_fork.h"
#include "base/buffer.h"
#include "base/descriptor.h"
#include "memory/segment.h"

namespace moolink::memory {

// Memory that another process lends, mapped for reading. Its owner writes it again once it is
// returned, but a forked child is unknown to the owner: buffers in use at a fork are copied before
// it, and the copy replaces them in this process and the child. The owner's memory is mapped
// elsewhere then.
class BorrowedSegment final : public AtFork, public std::enable_shared_from_this<BorrowedSegment> {
 public:
  // Throws Exception{wire} unless it is a sealed memfd of at most `max_size` bytes.
  static std::shared_ptr<BorrowedSegment> map(const Descriptor& descriptor, std::size_t max_size);
  ~BorrowedSegment() { leave_forks(Rank::memory); }

  // A part of it, within its size; keeps the whole mapped.
  Buffer buffer(std::size_t offset, std::size_t size);
  // The whole, where the owner's memory is mapped; nothing in a forked child.
  LentBytes bytes() { return {shared_from_this(), &bytes_}; }

 private:
  using Parts = std::list<std::span<const std::byte>>;
  struct InUse;

  explicit BorrowedSegment(std::shared_ptr<Segment> segment);

  bool is_in_use() const;
  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override;

  std::mutex mutex_;  // buffers are released on any thread
  std::shared_ptr<Segment> segment_;
  std::span<const std::byte> bytes_;
  Parts in_use_;  // of buffers that a fork has copied: nothing
};

}  // namespace moolink::memory
