#include "transport/grant_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"

namespace moolink::transport {

// Owns a block, which keeps the pool and the block's segment.
struct GrantPool::InUse {
  explicit InUse(std::shared_ptr<GrantPool> of) : pool(std::move(of)) {}
  ~InUse() {
    if (block) pool->release(*block);
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

  std::shared_ptr<GrantPool> pool;
  std::optional<FreeBlock> block;
};

std::optional<GrantPool::Block> GrantPool::allocate(std::size_t bytes) {
  if (bytes > kLargestBlock) return std::nullopt;
  const std::size_t block_bytes = std::bit_ceil(std::max(bytes, kSmallestBlock));
  // Before taking the block: if there is no memory for its owner, nothing is lost.
  const auto owner = std::make_shared<InUse>(shared_from_this());
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
  std::size_t& idle = idle_[block_bytes];
  const FreeBlock block = blocks.back();
  blocks.pop_back();
  free_bytes_ -= block_bytes;
  idle = std::min(idle, blocks.size());
  SegmentEntry& entry = segments_.at(block.segment);
  ++entry.in_use;
  owner->block = block;
  Block granted;
  granted.place = {++last_grant_, block.segment, block.offset, bytes};
  granted.memory = {owner, entry.segment->data() + block.offset, bytes};
  return granted;
}

void GrantPool::add_segment(std::size_t block_bytes) {
  const std::size_t size = std::max(block_bytes, kSegmentBytes);
  const auto segment = memory::Segment::create_to_receive(size, "moolink-grants");
  const std::uint64_t number = last_segment_ + 1;
  std::vector<FreeBlock>& blocks = free_[block_bytes];
  const auto alike = std::count_if(segments_.begin(), segments_.end(), [&](const auto& entry) {
    return entry.second.block_bytes == block_bytes;
  });
  // With room for all blocks of the size, no release allocates; nor does the code below.
  blocks.reserve((static_cast<std::size_t>(alike) + 1) * (size / block_bytes));
  segments_.emplace(number, SegmentEntry{segment, block_bytes});
  last_segment_ = number;
  for (std::size_t end = size; end > 0; end -= block_bytes) {
    blocks.push_back({number, end - block_bytes});
  }
  free_bytes_ += size;
}

void GrantPool::release(const FreeBlock& block) {
  const std::lock_guard guard(mutex_);
  const auto of = segments_.find(block.segment);
  SegmentEntry& entry = of->second;
  --entry.in_use;
  if (closed_ || entry.forked) {
    if (entry.in_use > 0) return;
    segments_.erase(of);
    ++retired_;
    return;
  }
  const std::size_t block_bytes = entry.block_bytes;
  free_[block_bytes].push_back(block);
  free_bytes_ += block_bytes;
  if (free_bytes_ > kMaxFreeBytes) retire_surplus();
}

// Only segments of one block: the others nearly always have a block in use. The largest first,
// because they are requested most rarely.
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
  ++retired_;
  free_bytes_ -= block_bytes;
  std::size_t& idle = idle_[block_bytes];
  idle = std::min(idle, blocks.size());
}

// Segments of one block, as above. The coldest ones were free all the time.
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

std::shared_ptr<memory::Segment> GrantPool::segment(std::uint64_t number) {
  const std::lock_guard guard(mutex_);
  const auto found = segments_.find(number);
  return found == segments_.end() ? nullptr : found->second.segment;
}

void GrantPool::close() {
  const std::lock_guard guard(mutex_);
  end();
}

void GrantPool::end() {
  closed_ = true;
  free_.clear();
  std::erase_if(segments_, [](const auto& entry) { return entry.second.in_use == 0; });
}

// --- forks

void GrantPool::before_fork() noexcept {
  mutex_.lock();
  for (auto& [number, entry] : segments_) {
    if (entry.in_use == 0 || std::exchange(entry.forked, true)) continue;
    entry.is_private = entry.segment->make_private();
    withhold(number, entry.block_bytes);
  }
}

// Its free blocks are not reused either, so it is removed when those in use are released.
void GrantPool::withhold(std::uint64_t segment, std::size_t block_bytes) {
  const auto of_size = free_.find(block_bytes);
  if (of_size == free_.end()) return;
  std::vector<FreeBlock>& blocks = of_size->second;
  const std::size_t withheld =
      std::erase_if(blocks, [&](const FreeBlock& block) { return block.segment == segment; });
  free_bytes_ -= withheld * block_bytes;
  const auto idle = idle_.find(block_bytes);
  if (idle != idle_.end()) idle->second = std::min(idle->second, blocks.size());
}

void GrantPool::after_fork_in_child() noexcept {
  end();
  for (auto& [number, entry] : segments_) {
    if (!entry.is_private) entry.segment->forbid();  // the system has refused a mapping
  }
  mutex_.unlock();
}

}  // namespace moolink::transport
