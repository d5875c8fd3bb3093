#pragma once

#include <cstddef>
#include <memory>

#include "base/buffer.h"
#include "base/descriptor.h"

namespace moolink::device {

class Devices;

// Memory of a device that moolink holds, for messages to have in turn. The processor cannot read
// it. What goes wrong is Exception{error}, with the device and CUDA's words.
class Block {
 public:
  // Throws if the device has no such memory left.
  Block(Devices& devices, int device, std::size_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  int device() const { return device_; }
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // As a dmabuf, by which another device of the machine reads all of it. Throws where CUDA, the
  // kernel or the device cannot do that.
  Descriptor export_dmabuf() const;

 private:
  friend Buffer copy_to_host(const Buffer& bytes, Allocator& allocator);

  Devices& devices_;
  const int device_;
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
};

// Memory for so many bytes, in a block that was used before if there is one. Any thread may let go
// of it.
MutableBuffer allocate(Devices& devices, int device, std::size_t bytes);

// In which the bytes lie; null: in the host's memory.
std::shared_ptr<const Block> block_of(const Buffer& bytes);
// The same bytes, which lie in a block, in the host's memory; waits for the device.
Buffer copy_to_host(const Buffer& bytes, Allocator& allocator);

}  // namespace moolink::device
