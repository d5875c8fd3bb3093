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

// Memory that another process lends, mapped for reading. Its owner may write it again once it is
// returned, but the owner does not know of forked children. So before a fork a copy replaces the
// buffers in use, in this process and the child, and the owner's memory is mapped elsewhere. Most
// of it is copied before the locks are taken: to copy gigabytes takes longer than peers wait for a
// heartbeat.
class BorrowedSegment final : public AtFork, public std::enable_shared_from_this<BorrowedSegment> {
 public:
  // Throws Exception{wire} unless it is a sealed memfd of at most `max_size` bytes.
  static std::shared_ptr<BorrowedSegment> map(const Descriptor& descriptor, std::size_t max_size);
  ~BorrowedSegment() { leave_forks(Rank::memory); }

  // A part of it, within its size; keeps the whole mapped.
  Buffer buffer(std::size_t offset, std::size_t size);
  // The whole of the owner's memory; empty in a forked child.
  LentBytes bytes() { return {shared_from_this(), &bytes_}; }

 private:
  struct Part {
    std::span<const std::byte> bytes;  // empty: a fork has copied it
    bool prepared = false;             // it is in prepared_, or will be
  };
  using Parts = std::list<Part>;
  struct InUse;

  explicit BorrowedSegment(std::shared_ptr<Segment> segment);

  bool is_in_use() const;
  std::shared_ptr<AtFork> begin_preparing() noexcept override;
  void prepare_fork() noexcept override;
  void before_fork() noexcept override;
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override;

  std::mutex mutex_;  // buffers are released on any thread
  std::shared_ptr<Segment> segment_;
  std::span<const std::byte> bytes_;
  Parts in_use_;
  bool preparing_ = false;
  Segment::Copy prepared_;  // for the next fork, of the segment below
  std::shared_ptr<Segment> prepared_of_;
};

}  // namespace moolink::memory
