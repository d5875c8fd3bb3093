#include "memory/borrowed_segment.h"

#include <algorithm>
#include <utility>

namespace moolink::memory {

// Its node is in the segment's list for as long as it lives.
struct BorrowedSegment::InUse {
  InUse(std::shared_ptr<BorrowedSegment> of, std::size_t offset, std::size_t size)
      : segment(std::move(of)), node(1) {
    const std::lock_guard guard(segment->mutex_);
    mapping = segment->segment_;
    node.front() = segment->bytes_.subspan(offset, size);
    data = node.front().data();  // a fork may move the mapping after this
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
  std::shared_ptr<Segment> mapping;
  const std::byte* data;
  Parts node;
  Parts::iterator at;
};

BorrowedSegment::BorrowedSegment(std::shared_ptr<Segment> segment)
    : segment_(std::move(segment)), bytes_(segment_->bytes()) {
  join_forks(Rank::memory);
}

std::shared_ptr<BorrowedSegment> BorrowedSegment::map(const Descriptor& descriptor,
                                                      std::size_t max_size) {
  return std::shared_ptr<BorrowedSegment>(
      new BorrowedSegment(Segment::map_read_only(descriptor, max_size)));
}

Buffer BorrowedSegment::buffer(std::size_t offset, std::size_t size) {
  auto owner = std::make_shared<InUse>(shared_from_this(), offset, size);
  const std::byte* data = owner->data;
  return {std::move(owner), data, size};
}

bool BorrowedSegment::is_in_use() const {
  return std::ranges::any_of(in_use_, [](const auto& part) { return !part.empty(); });
}

void BorrowedSegment::before_fork() noexcept {
  mutex_.lock();
  if (!is_in_use()) return;
  std::shared_ptr<Segment> elsewhere = segment_->map_again();
  if (elsewhere == nullptr || !segment_->replace_by_copy(in_use_)) return;
  segment_ = std::move(elsewhere);
  bytes_ = segment_->bytes();
  for (auto& part : in_use_) part = bytes_.first(0);
}

void BorrowedSegment::after_fork_in_child() noexcept {
  bytes_ = {};
  if (is_in_use()) {
    segment_->forbid();  // the copy failed for lack of memory
  } else {
    segment_ = nullptr;
  }
  mutex_.unlock();
}

}  // namespace moolink::memory
