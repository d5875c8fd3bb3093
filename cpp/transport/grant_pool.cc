#include "transport/grant_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"

namespace moolink::transport {

std::optional<GrantPool::Block> GrantPool::allocate(std::size_t bytes) {
  if (bytes > kLargestBlock) return std::nullopt;
  const std::size_t block_bytes = std::bit_ceil(std::max(bytes, kSmallestBlock));
  const std::lock_guard guard(mutex_);
  if (closed_) return std::nullopt;
  std::vector<FreeBlock>& blocks = free_[block_bytes];
  if (blocks.empty()) {
    try {
      add_segment(block_bytes);
    } catch (const Exception&) {
      return std::nullopt;
    }
  }
  const FreeBlock block = blocks.back();
  blocks.pop_back();
  free_bytes_ -= block_bytes;
  std::size_t& idle = idle_[block_bytes];
  idle = std::min(idle, blocks.size());
  Block granted;
  granted.place = {++last_grant_, block.segment, block.offset, bytes};
  auto segment = segments_.at(block.segment).segment;
  std::byte* data = segment->data() + block.offset;
  // The buffer keeps its own segment mapped, also when the pool has closed.
  std::shared_ptr<void> owner(static_cast<void*>(data),
                              [pool = shared_from_this(), segment = std::move(segment),
                               block](void*) { pool->release(block); });
  granted.memory = {std::move(owner), data, bytes};
  return granted;
}

void GrantPool::add_segment(std::size_t block_bytes) {
  const std::size_t size = std::max(block_bytes, kSegmentBytes);
  auto segment = memory::Segment::create(size, "moolink-grants");
  const std::uint64_t number = ++last_segment_;
  changes_.push_back({number, segment});
  changed_ = true;
  std::vector<FreeBlock>& blocks = free_[block_bytes];
  for (std::size_t end = size; end > 0; end -= block_bytes) {
    blocks.push_back({number, end - block_bytes});
  }
  free_bytes_ += size;
  segments_.emplace(number, SegmentEntry{std::move(segment), block_bytes});
}

void GrantPool::release(const FreeBlock& block) {
  const std::lock_guard guard(mutex_);
  if (closed_) return;
  const std::size_t block_bytes = segments_.at(block.segment).block_bytes;
  free_[block_bytes].push_back(block);
  free_bytes_ += block_bytes;
  if (free_bytes_ > kMaxFreeBytes) retire_surplus();
}

// Only segments of one block: of the others some block is nearly always in use. The largest first,
// because they are asked for most rarely.
void GrantPool::retire_surplus() {
  for (auto size = free_.rbegin(); size != free_.rend() && size->first >= kSegmentBytes; ++size) {
    std::vector<FreeBlock>& blocks = size->second;
    while (!blocks.empty() && free_bytes_ > kMaxFreeBytes) retire_coldest(size->first, blocks);
  }
}

void GrantPool::retire_coldest(std::size_t block_bytes, std::vector<FreeBlock>& blocks) {
  const std::uint64_t number = blocks.front().segment;
  blocks.erase(blocks.begin());
  segments_.erase(number);
  free_bytes_ -= block_bytes;
  changes_.push_back({number, nullptr});
  changed_ = true;
  std::size_t& idle = idle_[block_bytes];
  idle = std::min(idle, blocks.size());
}

// Segments of one block, as above. The coldest ones have been free all the time.
bool GrantPool::retire_idle() {
  const std::lock_guard guard(mutex_);
  bool more = false;
  for (auto size = free_.lower_bound(kSegmentBytes); size != free_.end(); ++size) {
    auto& [block_bytes, blocks] = *size;
    for (std::size_t idle = idle_[block_bytes]; idle > 0; --idle) {
      retire_coldest(block_bytes, blocks);
    }
    idle_[block_bytes] = blocks.size();
    more = more || !blocks.empty();
  }
  const auto is_large = [](const auto& entry) { return entry.second.block_bytes >= kSegmentBytes; };
  return more || std::any_of(segments_.begin(), segments_.end(), is_large);
}

std::vector<GrantPool::Change> GrantPool::take_changes() {
  const std::lock_guard guard(mutex_);
  changed_ = false;
  return std::exchange(changes_, {});
}

void GrantPool::close() {
  const std::lock_guard guard(mutex_);
  closed_ = true;
  free_.clear();
  segments_.clear();
  changes_.clear();
}

}  // namespace moolink::transport
