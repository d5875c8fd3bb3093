#include "memory/borrowed_segment.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace moolink::memory {

// Its node is in the segment's list for as long as it lives.
struct BorrowedSegment::InUse {
  InUse(std::shared_ptr<BorrowedSegment> of, std::size_t offset, std::size_t size)
      : segment(std::move(of)), node{Part{}} {
    const std::lock_guard guard(segment->mutex_);
    mapping = segment->segment_;
    node.front().bytes = segment->bytes_.subspan(offset, size);
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
  const std::byte* data = owner->at->bytes.data();
  return {std::move(owner), data, size};
}

void BorrowedSegment::before_fork() noexcept {
  mutex_.lock();
  auto shared = in_use_ | std::views::filter([](const Part& part) { return !part.copied; }) |
                std::views::transform(&Part::bytes);
  if (shared.empty()) return;
  std::shared_ptr<Segment> elsewhere = segment_->map_again();
  if (elsewhere == nullptr || !segment_->replace_by_copy(shared)) return;
  for (Part& part : in_use_) part.copied = true;
  segment_ = std::move(elsewhere);
  bytes_ = segment_->bytes();
}

void BorrowedSegment::after_fork_in_child() noexcept {
  bytes_ = {};
  if (std::ranges::all_of(in_use_, &Part::copied)) {
    segment_ = nullptr;
  } else {
    segment_->forbid();  // the copy failed for lack of memory
  }
  mutex_.unlock();
}

}  // namespace moolink::memory
