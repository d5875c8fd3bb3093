#include "memory/segment_pool.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"

namespace moolink::memory {

std::size_t SegmentPool::block_size(std::size_t bytes) const {
  if (bytes > settings_.largest_block) throw std::bad_alloc();
  return std::bit_ceil(std::max(bytes, settings_.smallest_block));
}

SegmentPool::Block SegmentPool::take(std::size_t bytes) {
  const std::size_t block_bytes = block_size(bytes);
  std::unique_lock lock(mutex_);
  if (closed_) throw Exception(ErrorCode::closed, "the pool is closed");
  if (sizes_[block_bytes].free.empty()) add_segment(block_bytes);
  Size& size = sizes_[block_bytes];
  const Place place = size.free.back();
  size.free.pop_back();
  size.idle = std::min(size.idle, size.free.size());
  Entry& entry = segments_.at(place.segment);
  ++entry.in_use;
  std::byte* const data = entry.segment->data() + place.offset;
  lock.unlock();
  // If the control block cannot be allocated, shared_ptr runs the deleter: the block is not lost.
  std::shared_ptr<void> owner(static_cast<void*>(data),
                              [pool = shared_from_this(), place](void*) { pool->release(place); });
  return {place, {std::move(owner), data, bytes}};
}

void SegmentPool::add_segment(std::size_t block_bytes) {
  const std::size_t bytes = std::max(block_bytes, settings_.segment_bytes);
  const auto make = settings_.lent ? Segment::create_to_lend : Segment::create_to_receive;
  const std::shared_ptr<Segment> segment = make(bytes, settings_.label);
  const std::uint64_t number = last_segment_ + 1;
  std::vector<Place>& blocks = sizes_[block_bytes].free;
  const auto alike = std::ranges::count_if(
      segments_, [&](const auto& entry) { return entry.second.block_bytes == block_bytes; });
  // With room for all blocks of the size, no release allocates; nor does the code after emplace().
  const std::size_t all = (static_cast<std::size_t>(alike) + 1) * (bytes / block_bytes);
  if (blocks.capacity() < all) blocks.reserve(std::max(all, 2 * blocks.capacity()));
  std::map<const std::byte*, Extent> address{{segment->data(), {number, bytes}}};
  segments_.emplace(number, Entry{segment, block_bytes});
  by_address_.merge(address);
  last_segment_ = number;
  for (std::size_t end = bytes; end > 0; end -= block_bytes) {
    blocks.push_back({number, end - block_bytes});
  }
}

void SegmentPool::release(const Place& block) {
  const std::lock_guard guard(mutex_);
  const auto of = segments_.find(block.segment);
  Entry& entry = of->second;
  --entry.in_use;
  if (closed_ || entry.forked) {
    if (entry.in_use == 0) retire(of);
    return;
  }
  sizes_.find(entry.block_bytes)->second.free.push_back(block);
  if (entry.block_bytes >= settings_.segment_bytes) retire_surplus();
}

SegmentPool::Segments::iterator SegmentPool::retire(Segments::iterator segment) {
  by_address_.erase(segment->second.segment->data());
  ++retired_;
  return segments_.erase(segment);
}

void SegmentPool::retire_coldest(Size& size) {
  retire(segments_.find(size.free.front().segment));
  size.free.erase(size.free.begin());
  size.idle = std::min(size.idle, size.free.size());
}

// Only segments of one block: the others nearly always have a block in use. The largest first,
// because they are requested most rarely.
void SegmentPool::retire_surplus() {
  const auto surplus = [](const Size& size) {
    return size.free.size() - std::min(size.free.size(), size.kept);
  };
  std::size_t bytes = 0;
  const auto first = sizes_.lower_bound(settings_.segment_bytes);
  for (auto at = first; at != sizes_.end(); ++at) bytes += at->first * surplus(at->second);
  for (auto at = sizes_.end(); at != first;) {
    auto& [block_bytes, size] = *--at;
    for (; bytes > settings_.max_free && surplus(size) > 0; bytes -= block_bytes) {
      retire_coldest(size);
    }
  }
}

// Segments of one block, as above. The coldest ones were free all the time.
bool SegmentPool::retire_idle() {
  const std::lock_guard guard(mutex_);
  for (auto at = sizes_.lower_bound(settings_.segment_bytes); at != sizes_.end(); ++at) {
    Size& size = at->second;
    for (std::size_t idle = size.idle; idle > 0; --idle) retire_coldest(size);
    size.idle = size.free.size();
  }
  return std::ranges::any_of(segments_, [this](const auto& entry) {
    return entry.second.block_bytes >= settings_.segment_bytes;
  });
}

std::shared_ptr<Segment> SegmentPool::segment(std::uint64_t number) const {
  const std::lock_guard guard(mutex_);
  const auto found = segments_.find(number);
  return found == segments_.end() ? nullptr : found->second.segment;
}

void SegmentPool::close() {
  const std::lock_guard guard(mutex_);
  end();
}

void SegmentPool::end() {
  closed_ = true;
  for (auto& [bytes, size] : sizes_) {
    size.free.clear();
    size.idle = 0;
  }
  for (auto at = segments_.begin(); at != segments_.end();) {
    at = at->second.in_use == 0 ? retire(at) : std::next(at);
  }
}

// --- forks

// A segment with blocks in use is retired when they are released.
void SegmentPool::before_fork() noexcept {
  mutex_.lock();
  for (auto& [number, entry] : segments_) {
    if (entry.in_use == 0 || std::exchange(entry.forked, true)) continue;
    if (!settings_.lent) entry.is_private = entry.segment->make_private();
    Size& size = sizes_.find(entry.block_bytes)->second;
    std::erase_if(size.free, [of = number](const Place& block) { return block.segment == of; });
    size.idle = std::min(size.idle, size.free.size());
  }
}

void SegmentPool::after_fork_in_child() noexcept {
  for (auto& [number, entry] : segments_) entry.segment->close_descriptor();
  end();
  for (auto& [number, entry] : segments_) {
    // The system refused the private mapping: the child must not use the parent's memory.
    if (!settings_.lent && !entry.is_private) entry.segment->forbid();
  }
  mutex_.unlock();
}

}  // namespace moolink::memory
