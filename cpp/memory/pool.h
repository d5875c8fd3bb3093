#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/buffer.h"

namespace moolink::memory {

// The identity of memory for a device that reads it: a pool's block keeps it from owner to owner,
// other memory has it while its owner lives.
struct Home {
  std::shared_ptr<const void> lives;  // until the memory is released; null: unknown
  std::span<const std::byte> memory;
};
Home home_of(const Buffer& bytes);

// Memory for received messages and captured tensors: 64-byte aligned blocks that are reused warm.
// Writing to fresh pages runs at 2-3 GB/s, to warm ones at ten times that, so freed blocks are kept
// by size class, up to a bound; the rest is returned to the system. Blocks may outlive the pool and
// may be freed on any thread.
class Pool final : public Allocator {
 public:
  explicit Pool(std::size_t retain_bytes = std::size_t{512} << 20);
  ~Pool() override;

  MutableBuffer allocate(std::size_t size) override;  // throws std::bad_alloc

  // For a block size that is needed again and again: while the token lives, the pool keeps one more
  // free block of it, also beyond the bound. Throws std::bad_alloc.
  std::shared_ptr<void> keep_one(std::size_t size);

  std::size_t retained_bytes() const;  // without the blocks that tokens keep

 private:
  class Shelves;
  friend Home home_of(const Buffer& bytes);

  std::shared_ptr<Shelves> shelves_;
};

}  // namespace moolink::memory
