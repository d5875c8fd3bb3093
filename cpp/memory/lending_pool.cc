#include "memory/lending_pool.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "base/error.h"

namespace moolink::memory {
namespace {

std::size_t block_size(std::size_t size) {
  return std::bit_ceil(std::max(size, LendingPool::kSmallestBlock));
}

}  // namespace

MutableBuffer LendingPool::allocate(std::size_t size) {
  if (size > kLargestBlock) throw std::bad_alloc();
  const auto [block, data] = take(block_size(size));
  // If the control block cannot be allocated, shared_ptr runs the deleter: the block is not lost.
  std::shared_ptr<void> owner(static_cast<void*>(data), [pool = shared_from_this(), block = block](
                                                            void*) { pool->release(block); });
  return {std::move(owner), data, size};
}

std::pair<LendingPool::Place, std::byte*> LendingPool::take(std::size_t block_bytes) {
  const std::lock_guard guard(mutex_);
  if (abandoned_) throw std::bad_alloc();
  std::vector<Place>& blocks = free_[block_bytes];
  if (blocks.empty()) add_segment(block_bytes);
  const Place block = blocks.back();
  blocks.pop_back();
  Entry& entry = segments_.at(block.segment);
  ++entry.in_use;
  return {block, entry.segment->data() + block.offset};
}

void LendingPool::add_segment(std::size_t block_bytes) {
  const std::size_t size = std::max(block_bytes, kSegmentBytes);
  std::shared_ptr<Segment> segment;
  try {
    segment = Segment::create_to_lend(size, "moolink-lending");
  } catch (const Exception&) {
    throw std::bad_alloc();  // no memory, or no descriptor
  }
  const std::uint64_t number = ++last_segment_;
  std::vector<Place>& blocks = free_[block_bytes];
  for (std::size_t end = size; end > 0; end -= block_bytes) {
    blocks.push_back({number, end - block_bytes});
  }
  by_address_.emplace(segment->data(), number);
  segments_.emplace(number, Entry{std::move(segment), block_bytes});
}

void LendingPool::release(const Place& block) {
  const std::lock_guard guard(mutex_);
  const auto of = segments_.find(block.segment);
  const std::size_t block_bytes = of->second.block_bytes;
  --of->second.in_use;
  if (of->second.forked) {
    if (of->second.in_use == 0) retire(of);
    return;
  }
  free_[block_bytes].push_back(block);
  if (block_bytes >= kSegmentBytes) retire_surplus();
}

std::shared_ptr<void> LendingPool::keep_one(std::size_t size) {
  if (size > kLargestBlock) throw std::bad_alloc();
  const std::size_t block_bytes = block_size(size);
  {
    const std::lock_guard guard(mutex_);
    ++kept_[block_bytes];
  }
  return {nullptr, [pool = shared_from_this(), block_bytes](void*) {
            const std::lock_guard guard(pool->mutex_);
            --pool->kept_[block_bytes];
            if (!pool->abandoned_) pool->retire_surplus();
          }};
}

// The number of free blocks of this size beyond those that tokens keep.
std::size_t LendingPool::surplus(std::size_t block_bytes) const {
  const auto kept = kept_.find(block_bytes);
  const std::size_t all = free_.at(block_bytes).size();
  return all - std::min(all, kept == kept_.end() ? 0 : kept->second);
}

// Only segments of one block: the others nearly always have a block in use. The largest first,
// because they are requested most rarely.
void LendingPool::retire_surplus() {
  std::size_t bytes = 0;
  for (auto size = free_.lower_bound(kSegmentBytes); size != free_.end(); ++size) {
    bytes += size->first * surplus(size->first);
  }
  for (auto size = free_.rbegin(); size != free_.rend() && size->first >= kSegmentBytes; ++size) {
    std::vector<Place>& blocks = size->second;
    while (bytes > kMaxFreeBytes && surplus(size->first) > 0) {
      const auto coldest = segments_.find(blocks.front().segment);
      blocks.erase(blocks.begin());
      retire(coldest);
      bytes -= size->first;
    }
  }
}

void LendingPool::retire(Segments::iterator segment) {
  by_address_.erase(segment->second.segment->data());
  segments_.erase(segment);
  ++retired_;
}

std::optional<LendingPool::Place> LendingPool::find(const std::byte* data, std::size_t size) const {
  const std::lock_guard guard(mutex_);
  auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return std::nullopt;
  const auto& [begin, number] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(data - begin);
  const std::size_t whole = segments_.at(number).segment->size();
  if (offset > whole || size > whole - offset) return std::nullopt;
  return Place{number, offset};
}

std::shared_ptr<Segment> LendingPool::segment(std::uint64_t number) const {
  const std::lock_guard guard(mutex_);
  const auto found = segments_.find(number);
  return found == segments_.end() ? nullptr : found->second.segment;
}

// A segment with blocks in use is removed when they are released: its free blocks are not reused
// either.
void LendingPool::before_fork() noexcept {
  mutex_.lock();
  for (auto& [number, entry] : segments_) {
    if (entry.in_use == 0 || std::exchange(entry.forked, true)) continue;
    std::erase_if(free_[entry.block_bytes],
                  [segment = number](const Place& block) { return block.segment == segment; });
  }
}

void LendingPool::after_fork_in_child() noexcept {
  abandoned_ = true;
  free_.clear();
  for (auto entry = segments_.begin(); entry != segments_.end();) {
    const auto segment = entry++;
    segment->second.segment->close_descriptor();
    if (segment->second.in_use == 0) retire(segment);
  }
  mutex_.unlock();
}

}  // namespace moolink::memory
