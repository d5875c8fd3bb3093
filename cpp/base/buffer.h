#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace moolink {

// Bytes and a reference to their owner. The owner's deleter frees the bytes after the last
// reference. It may run on any thread, with or without the GIL, and therefore never touches Python.
template <class Byte, class Owner>
class BasicBuffer {
 public:
  BasicBuffer() = default;
  BasicBuffer(std::shared_ptr<Owner> owner, Byte* data, std::size_t size)
      : owner_(std::move(owner)), data_(data), size_(size) {}
  template <class Writable>  // gives up writing
    requires std::is_const_v<Byte>
  BasicBuffer(const BasicBuffer<std::byte, Writable>& other)  // NOLINT(google-explicit-constructor)
      : owner_(other.owner()), data_(other.data()), size_(other.size()) {}

  Byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::span<Byte> span() const { return {data_, size_}; }
  const std::shared_ptr<Owner>& owner() const { return owner_; }
  BasicBuffer slice(std::size_t offset, std::size_t size) const {
    return {owner_, data_ + offset, size};
  }

 private:
  std::shared_ptr<Owner> owner_;
  Byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Memory that its holder may write.
using MutableBuffer = BasicBuffer<std::byte, void>;
// Immutable bytes: a message's bytes are the same in every attempt.
using Buffer = BasicBuffer<const std::byte, const void>;

// Memory that another process lends, mapped while the pointer lives. A fork may move the mapping:
// read the span again after each fork, under a lock that forks take.
using LentBytes = std::shared_ptr<const std::span<const std::byte>>;

// The source of memory for received bytes and captured tensors. Blocks are 64-byte aligned.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual MutableBuffer allocate(std::size_t size) = 0;  // throws std::bad_alloc
};

// Plain aligned heap memory; the memory layer's pool also keeps pages warm.
class HeapAllocator final : public Allocator {
 public:
  MutableBuffer allocate(std::size_t size) override;
};

// The same bytes in memory of this process alone (heap memory by default); throws std::bad_alloc.
Buffer private_copy(const Buffer& bytes, Allocator& allocator);
Buffer private_copy(const Buffer& bytes);

}  // namespace moolink
