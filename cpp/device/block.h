#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "device/devices.h"

namespace moolink::device {

// Memory of a device that moolink holds: this process's, reused for one message after another, or
// another process's, mapped here. The processor cannot read it. Errors are Exception{error}, with
// the device and CUDA's text.
class Block : public std::enable_shared_from_this<Block> {
 public:
  // Throws if the device has no such memory left.
  static std::shared_ptr<const Block> create(Devices& devices, int device, std::size_t bytes);
  // A block that another process has shared: its bytes stay readable, also when that process ends.
  static std::shared_ptr<const Block> map(Devices& devices, int device, const Descriptor& shared,
                                          std::size_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  int device() const { return device_; }
  std::byte* data() const { return memory_.data; }
  std::size_t bytes() const { return memory_.bytes; }
  // As a dmabuf, by which another device of the machine reads all of it. Throws if CUDA, the kernel
  // or the device does not support that.
  Descriptor export_dmabuf() const { return devices_.export_dmabuf(device_, memory_); }

  // Among the blocks of this process, from 1; never used twice. 0: it cannot be shared.
  std::uint64_t number() const { return number_; }
  // For map() in another process of the machine.
  Descriptor share() const { return devices_.export_to_processes(device_, memory_); }
  Uid device_uid() const { return devices_.uid(device_); }

  // True while another process may read its bytes. If it is true when they are released, the next
  // capture frees the block instead of using it again.
  std::atomic<bool>& lent() const { return lent_; }

  // Copies bytes of the block to the host's memory; waits for the device.
  void copy_to_host(std::span<const std::byte> bytes, std::byte* to) const;

 private:
  friend class Blocks;

  Block(Devices& devices, int device, DeviceMemory memory, std::uint64_t number);

  Devices& devices_;
  const int device_;
  const DeviceMemory memory_;
  const std::uint64_t number_;
  mutable std::atomic<bool> lent_{false};
};

// Memory for this many bytes, in a used block if there is one. Any thread may release it.
MutableBuffer allocate(Devices& devices, int device, std::size_t bytes);

// The block with the bytes; null: they are in the host's memory.
std::shared_ptr<const Block> block_of(const std::byte* bytes);
inline std::shared_ptr<const Block> block_of(const Buffer& bytes) { return block_of(bytes.data()); }
// The block of that number; null: it is gone.
std::shared_ptr<const Block> block_numbered(std::uint64_t number);
// Rises whenever a block that could be shared is gone.
std::uint64_t blocks_gone();

// Bytes of a block as another process finds them.
struct Place {
  std::uint64_t block = 0;
  std::size_t offset = 0;
  std::shared_ptr<std::atomic<bool>> lent;  // Block::lent()
};
// Empty: the bytes are no block's, or no other process can map it.
std::optional<Place> place_of(const Buffer& bytes);

// The same bytes in the host's memory; waits for the device.
Buffer copy_to_host(const Buffer& bytes, Allocator& allocator);
// The same of those parts that are in blocks, in place; others cost only a look-up of their
// address.
void bring_to_host(std::span<Buffer> parts, Allocator& allocator);

}  // namespace moolink::device
