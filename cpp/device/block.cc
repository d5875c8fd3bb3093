#include "device/block.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "device/devices.h"

namespace moolink::device {
namespace {

// The driver gives memory out in pages of this size; a dmabuf is of whole pages.
constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr std::size_t kMostIdle = std::size_t{512} << 20;  // bytes kept, of all devices

// Blocks that no message has. Never destroyed, as Devices.
class Shelf {
 public:
  static Shelf& process() {
    static Shelf& one = *new Shelf();
    return one;
  }

  std::shared_ptr<const Block> take(Devices& devices, int device, std::size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      auto& blocks = idle_[{&devices, device, bytes}];
      if (!blocks.empty()) {
        std::shared_ptr<const Block> block = std::move(blocks.back());
        blocks.pop_back();
        idle_bytes_ -= bytes;
        return block;
      }
    }
    return std::make_shared<const Block>(devices, device, bytes);
  }

  // What is not kept goes with the last reference, without the lock.
  void put_back(Devices& devices, const std::shared_ptr<const Block>& block) noexcept {
    const std::lock_guard lock(mutex_);
    if (idle_bytes_ + block->bytes() > kMostIdle) return;
    try {
      idle_[{&devices, block->device(), block->bytes()}].push_back(block);
      idle_bytes_ += block->bytes();
    } catch (const std::bad_alloc&) {
      return;  // no room for the note
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<const Devices*, int, std::size_t>, std::vector<std::shared_ptr<const Block>>>
      idle_;
  std::size_t idle_bytes_ = 0;
};

// What gives a block back with its last reference.
struct Return {
  Devices* devices;
  std::shared_ptr<const Block> block;

  void operator()(void*) noexcept {
    Shelf::process().put_back(*devices, block);
    block.reset();
  }
};

}  // namespace

Block::Block(Devices& devices, int device, std::size_t bytes)
    : devices_(devices), device_(device), bytes_(bytes), data_(devices.allocate(device, bytes)) {}

Block::~Block() { devices_.free(device_, data_); }

Descriptor Block::export_dmabuf() const { return devices_.export_dmabuf(device_, {data_, bytes_}); }

MutableBuffer allocate(Devices& devices, int device, std::size_t bytes) {
  const std::size_t whole = std::max(kPage, std::bit_ceil(bytes));
  std::shared_ptr<const Block> block = Shelf::process().take(devices, device, whole);
  std::byte* data = block->data();
  return {std::shared_ptr<void>(data, Return{&devices, std::move(block)}), data, bytes};
}

std::shared_ptr<const Block> block_of(const Buffer& bytes) {
  const Return* held = std::get_deleter<Return>(bytes.owner());
  return held == nullptr ? nullptr : held->block;
}

Buffer copy_to_host(const Buffer& bytes, Allocator& allocator) {
  const std::shared_ptr<const Block> block = block_of(bytes);
  const MutableBuffer copy = allocator.allocate(bytes.size());
  const Transfer transfer{bytes.data(), copy.data(), bytes.size()};
  block->devices_.stream(block->device())->copy_to_host({&transfer, 1});
  return copy;
}

}  // namespace moolink::device
