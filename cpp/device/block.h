#pragma once

#include <cstddef>
#include <memory>

#include "base/buffer.h"
#include "base/descriptor.h"

namespace moolink::device {

class Devices;

// Memory of a device that moolink holds, reused for one message after another. The processor cannot
// read it. Errors are Exception{error}, with the device and CUDA's text.
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
  // As a dmabuf, by which another device of the machine reads all of it. Throws if CUDA, the kernel
  // or the device does not support that.
  Descriptor export_dmabuf() const;

 private:
  friend Buffer copy_to_host(const Buffer& bytes, Allocator& allocator);

  Devices& devices_;
  const int device_;
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
};

// Memory for this many bytes, in a used block if there is one. Any thread may release it.
MutableBuffer allocate(Devices& devices, int device, std::size_t bytes);

// The block with the bytes; null: they are in the host's memory.
std::shared_ptr<const Block> block_of(const Buffer& bytes);
// Copies bytes of a block to the host's memory; waits for the device.
Buffer copy_to_host(const Buffer& bytes, Allocator& allocator);

}  // namespace moolink::device
