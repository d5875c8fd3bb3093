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
// returned, but a forked child is unknown to the owner: memory in use at a fork is copied before
// it, and the copy replaces it in this process and the child.
class BorrowedSegment final : public AtFork, public std::enable_shared_from_this<BorrowedSegment> {
 public:
  // Throws Exception{wire} unless it is a sealed memfd of at most `max_size` bytes.
  static std::shared_ptr<BorrowedSegment> map(Descriptor descriptor, std::size_t max_size);
  ~BorrowedSegment();

  std::size_t size() const { return segment_->size(); }
  // A part of it, within its size; keeps the whole mapped.
  Buffer buffer(std::size_t offset, std::size_t size);
  // The segment that maps the owner's memory after a fork has put a copy here; null: this one.
  std::shared_ptr<BorrowedSegment> successor();

 private:
  using Parts = std::list<std::span<const std::byte>>;
  struct InUse;

  explicit BorrowedSegment(std::shared_ptr<Segment> segment);
  static std::shared_ptr<BorrowedSegment> create(std::shared_ptr<Segment> segment);

  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override;

  std::mutex mutex_;  // buffers are released on any thread
  std::shared_ptr<Segment> segment_;
  Parts in_use_;
  bool copied_ = false;
  std::shared_ptr<Segment> next_;  // the owner's memory, until successor() takes it
};

}  // namespace moolink::memory
