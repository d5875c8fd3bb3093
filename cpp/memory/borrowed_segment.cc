#include "memory/borrowed_segment.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/barrier.h"

namespace moolink::memory {

namespace {

void copy_part(const Segment& segment, std::span<const std::byte> part, const Segment::Copy& to) {
  if (part.empty()) return;  // it is in an earlier copy
  std::memcpy(to.get() + (part.data() - segment.data()), part.data(), part.size());
}

}  // namespace

// Its node is in the segment's list for as long as it lives.
struct BorrowedSegment::InUse {
  InUse(std::shared_ptr<BorrowedSegment> of, std::size_t offset, std::size_t size)
      : segment(std::move(of)), node(1) {
    const std::lock_guard guard(segment->mutex_);
    mapping = segment->segment_;
    node.front().bytes = segment->bytes_.subspan(offset, size);
    data = node.front().bytes.data();  // a fork may move the mapping after this
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
  return std::ranges::any_of(in_use_, [](const Part& part) { return !part.bytes.empty(); });
}

std::shared_ptr<AtFork> BorrowedSegment::begin_preparing() noexcept {
  const std::lock_guard lock(mutex_);
  return is_in_use() ? weak_from_this().lock() : nullptr;  // null: it is being destroyed
}

// A part that is returned meanwhile may change while it is copied, but nothing reads it any more.
void BorrowedSegment::prepare_fork() noexcept {
  std::shared_ptr<Segment> of;
  std::vector<std::span<const std::byte>> parts;
  const auto look = [&] {
    const std::lock_guard lock(mutex_);
    if (preparing_ || prepared_ != nullptr) return;  // another thread forks now
    parts.reserve(in_use_.size());
    for (Part& part : in_use_) {
      part.prepared = true;
      parts.push_back(part.bytes);
    }
    of = segment_;
    preparing_ = true;
  };
  if (!guard(look, [](const Error&) {}) || of == nullptr) return;
  Segment::Copy copy = of->begin_copy();
  if (copy != nullptr) {
    for (const std::span<const std::byte> part : parts) copy_part(*of, part, copy);
  }
  const std::lock_guard lock(mutex_);
  preparing_ = false;
  if (segment_ != of) return;  // another thread was faster
  prepared_ = std::move(copy);
  prepared_of_ = std::move(of);
}

void BorrowedSegment::before_fork() noexcept {
  mutex_.lock();
  const bool is_prepared = prepared_ != nullptr && prepared_of_ == segment_;
  Segment::Copy copy = std::exchange(prepared_, nullptr);
  prepared_of_ = nullptr;
  if (!is_in_use()) return;
  if (!is_prepared) copy = segment_->begin_copy();
  std::shared_ptr<Segment> elsewhere = segment_->map_again();
  if (elsewhere == nullptr || copy == nullptr) return;
  for (const Part& part : in_use_) {
    if (!is_prepared || !part.prepared) copy_part(*segment_, part.bytes, copy);
  }
  if (!segment_->end_copy(std::move(copy))) return;
  segment_ = std::move(elsewhere);
  bytes_ = segment_->bytes();
  for (Part& part : in_use_) part.bytes = bytes_.first(0);
}

void BorrowedSegment::after_fork_in_child() noexcept {
  bytes_ = {};
  preparing_ = false;  // the thread that was preparing is the parent's
  if (is_in_use()) {
    segment_->forbid();  // the copy failed for lack of memory
  } else {
    segment_ = nullptr;
  }
  mutex_.unlock();
}

}  // namespace moolink::memory
