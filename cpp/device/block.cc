#include "device/block.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "base/at_fork.h"
#include "base/round_up.h"
#include "device/devices.h"

namespace moolink::device {
namespace {

// The driver allocates memory in pages of this size; a dmabuf has whole pages.
constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr std::size_t kMostIdle = std::size_t{512} << 20;  // bytes kept, of all devices
// A block may exceed the requested size by a quarter, and a page.
constexpr std::size_t kRoomiest = 4;

// Blocks that no message uses, the longest unused first. Never destroyed, like Devices.
class Shelf {
 public:
  static Shelf& process() {
    static Shelf& one = *new Shelf();
    return one;
  }

  std::shared_ptr<const Block> take(Devices& devices, int device, std::size_t bytes) {
    const std::size_t whole = round_up(bytes, kPage);
    std::vector<std::shared_ptr<const Block>> freed;  // without the lock: the driver may wait
    {
      const std::lock_guard lock(mutex_);
      const auto fits = [&](const Idle& idle) {
        return idle.devices == &devices && idle.block->device() == device &&
               idle.block->bytes() >= whole &&
               idle.block->bytes() <= whole + whole / kRoomiest + kPage;
      };
      const auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits);
      if (found != idle_.rend()) {
        std::shared_ptr<const Block> block = std::move(found->block);
        idle_bytes_ -= block->bytes();
        idle_.erase(std::next(found).base());
        return block;
      }
      while (idle_bytes_ > kMostIdle) {
        idle_bytes_ -= idle_.front().block->bytes();
        freed.push_back(std::move(idle_.front().block));
        idle_.pop_front();
      }
    }
    freed.clear();
    return std::make_shared<const Block>(devices, device, whole);
  }

  // On any thread, the network's too: the excess is freed when a capture takes the next block,
  // because the driver waits for the device's work before it frees.
  void put_back(Devices& devices, std::shared_ptr<const Block> block) {
    const std::lock_guard lock(mutex_);
    idle_bytes_ += block->bytes();
    idle_.push_back({&devices, std::move(block)});
  }

 private:
  struct Idle {
    const Devices* devices;
    std::shared_ptr<const Block> block;
  };

  std::mutex mutex_;
  HeldOverForks over_forks_{mutex_};
  std::deque<Idle> idle_;
  std::size_t idle_bytes_ = 0;
};

// Returns a block with its last reference.
struct Return {
  Devices* devices;
  std::shared_ptr<const Block> block;

  void operator()(void*) { Shelf::process().put_back(*devices, std::move(block)); }
};

}  // namespace

Block::Block(Devices& devices, int device, std::size_t bytes)
    : devices_(devices), device_(device), bytes_(bytes), data_(devices.allocate(device, bytes)) {}

Block::~Block() { devices_.free(device_, data_); }

Descriptor Block::export_dmabuf() const { return devices_.export_dmabuf(device_, {data_, bytes_}); }

MutableBuffer allocate(Devices& devices, int device, std::size_t bytes) {
  std::shared_ptr<const Block> block = Shelf::process().take(devices, device, bytes);
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
