#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

namespace moolink {

// Memory that its holder may write. The owner frees it with the last reference; a deleter may run
// on any thread, with or without the GIL, and therefore never touches Python.
class MutableBuffer {
 public:
  MutableBuffer() = default;
  MutableBuffer(std::shared_ptr<void> owner, std::byte* data, std::size_t size)
      : owner_(std::move(owner)), data_(data), size_(size) {}

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::span<std::byte> span() const { return {data_, size_}; }
  const std::shared_ptr<void>& owner() const { return owner_; }
  MutableBuffer slice(std::size_t offset, std::size_t size) const {
    return {owner_, data_ + offset, size};
  }

 private:
  std::shared_ptr<void> owner_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Immutable bytes: a message's bytes are the same in every attempt.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::shared_ptr<const void> owner, const std::byte* data, std::size_t size)
      : owner_(std::move(owner)), data_(data), size_(size) {}
  Buffer(const MutableBuffer& other)  // NOLINT(google-explicit-constructor): giving up writing
      : owner_(other.owner()), data_(other.data()), size_(other.size()) {}

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::span<const std::byte> span() const { return {data_, size_}; }
  const std::shared_ptr<const void>& owner() const { return owner_; }
  Buffer slice(std::size_t offset, std::size_t size) const {
    return {owner_, data_ + offset, size};
  }

 private:
  std::shared_ptr<const void> owner_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

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
