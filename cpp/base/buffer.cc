#include "base/buffer.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "base/round_up.h"

namespace moolink {

MutableBuffer HeapAllocator::allocate(std::size_t size) {
  constexpr std::size_t kAlignment = 64;
  const std::size_t rounded = round_up(size, kAlignment);
  if (rounded < size) throw std::bad_alloc();
  void* data = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (data == nullptr) throw std::bad_alloc();
  return {std::shared_ptr<void>(data, std::free), static_cast<std::byte*>(data), size};
}

Buffer private_copy(const Buffer& bytes, Allocator& allocator) {
  const MutableBuffer copy = allocator.allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(copy.data(), bytes.data(), bytes.size());
  return copy;
}

Buffer private_copy(const Buffer& bytes) {
  HeapAllocator heap;
  return private_copy(bytes, heap);
}

}  // namespace moolink
