#include "memory/borrowed_segment.h"

#include <utility>

namespace moolink::memory {

// Its node is in the segment's list for as long as it lives.
struct BorrowedSegment::InUse {
  InUse(std::shared_ptr<BorrowedSegment> of, std::span<const std::byte> bytes)
      : segment(std::move(of)), node{bytes} {
    const std::lock_guard guard(segment->mutex_);
    segment->in_use_.splice(segment->in_use_.begin(), node);
    at = segment->in_use_.begin();
  }
  ~InUse() {
    const std::lock_guard guard(segment->mutex_);
    node.splice(node.begin(), segment->in_use_, at);
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

  std::shared_ptr<BorrowedSegment> segment;
  Parts node;
  Parts::iterator at;
};

BorrowedSegment::BorrowedSegment(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {
  join_forks(Rank::memory);
}

BorrowedSegment::~BorrowedSegment() { leave_forks(Rank::memory); }

std::shared_ptr<BorrowedSegment> BorrowedSegment::create(std::shared_ptr<Segment> segment) {
  return std::shared_ptr<BorrowedSegment>(new BorrowedSegment(std::move(segment)));
}

std::shared_ptr<BorrowedSegment> BorrowedSegment::map(Descriptor descriptor, std::size_t max_size) {
  auto segment = Segment::map_read_only(std::move(descriptor), max_size);
  segment->close_descriptor();
  return create(std::move(segment));
}

Buffer BorrowedSegment::buffer(std::size_t offset, std::size_t size) {
  const std::byte* data = segment_->data() + offset;
  return {std::make_shared<InUse>(shared_from_this(), std::span(data, size)), data, size};
}

std::shared_ptr<BorrowedSegment> BorrowedSegment::successor() {
  std::shared_ptr<Segment> next;
  {
    const std::lock_guard guard(mutex_);
    next = std::exchange(next_, nullptr);
  }
  return next == nullptr ? nullptr : create(std::move(next));
}

void BorrowedSegment::before_fork() noexcept {
  mutex_.lock();
  if (copied_ || in_use_.empty()) return;
  next_ = segment_->map_again();
  copied_ = next_ != nullptr && segment_->replace_by_copy(in_use_);
}

void BorrowedSegment::after_fork_in_child() noexcept {
  next_ = nullptr;
  if (in_use_.empty()) {
    segment_ = nullptr;
  } else if (!copied_) {
    segment_->forbid();  // the copy failed for lack of memory
  }
  mutex_.unlock();
}

}  // namespace moolink::memory
