#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/buffer.h"
#include "base/descriptor.h"

namespace moolink::memory {

// Memory in a file, mapped shared: the kernel writes cold pages to the disk, so there can be more
// than fits into memory. The file has no name, and its space is freed once the last block and this
// are gone, also if the process is killed. Space is reserved before a block is returned: a write to
// it does not end in SIGBUS because the disk is full. A freed block's space is not reused. For one
// thread at a time; blocks may be freed on any.
class SpillFile final : public Allocator {
 public:
  // Throws std::system_error unless a file can be made in the directory.
  explicit SpillFile(std::string directory);

  // Throws std::system_error if there is no room on the disk.
  MutableBuffer allocate(std::size_t size) override;

  // Starts reading those of these bytes that are only on disk, without waiting.
  static void read_ahead(std::span<const std::byte> bytes) noexcept;

 private:
  std::string directory_;
  Descriptor file_;
  std::size_t end_ = 0;
};

}  // namespace moolink::memory
