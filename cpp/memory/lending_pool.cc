#include "memory/lending_pool.h"

#include <iterator>
#include <new>

#include "base/error.h"

namespace moolink::memory {

MutableBuffer LendingPool::allocate(std::size_t size) {
  try {
    return take(size).memory;
  } catch (const Exception& e) {
    throw NoMemory(e.error().message);  // none, no descriptor, or a limit on the size of files
  }
}

std::shared_ptr<void> LendingPool::keep_one(std::size_t size) {
  const std::size_t block_bytes = block_size(size);
  {
    const std::lock_guard guard(mutex_);
    ++sizes_[block_bytes].kept;
  }
  return {nullptr, [this, pool = shared_from_this(), block_bytes](void*) {
            const std::lock_guard guard(mutex_);
            --sizes_.find(block_bytes)->second.kept;
            retire_surplus();
          }};
}

std::optional<LendingPool::Place> LendingPool::find(const std::byte* data, std::size_t size) const {
  const std::lock_guard guard(mutex_);
  auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return std::nullopt;
  const auto& [begin, of] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(data - begin);
  if (offset > of.bytes || size > of.bytes - offset) return std::nullopt;
  return Place{of.segment, offset};
}

}  // namespace moolink::memory
