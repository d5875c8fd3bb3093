#include "device/block.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
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

}  // namespace

// The blocks of this process: all by their addresses, and those that no message uses, the longest
// unused first. Never destroyed, like Devices.
class Blocks {
 public:
  static Blocks& process() {
    static Blocks& one = *new Blocks();
    return one;
  }

  std::shared_ptr<const Block> take(Devices& devices, int device, std::size_t bytes) {
    const std::size_t whole = round_up(bytes, kPage);
    std::shared_ptr<const Block> taken;
    std::vector<std::shared_ptr<const Block>> freed;  // without the lock: the driver may wait
    {
      const std::lock_guard lock(mutex_);
      const auto fits = [&](const std::shared_ptr<const Block>& block) {
        return &block->devices_ == &devices && block->device() == device &&
               block->bytes() >= whole && block->bytes() <= whole + whole / kRoomiest + kPage;
      };
      const auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits);
      if (found != idle_.rend()) {
        taken = std::move(*found);
        idle_bytes_ -= taken->bytes();
        idle_.erase(std::next(found).base());
      }
      freed = std::exchange(spoiled_, {});
      while (idle_bytes_ > kMostIdle) {
        idle_bytes_ -= idle_.front()->bytes();
        freed.push_back(std::move(idle_.front()));
        idle_.pop_front();
      }
    }
    freed.clear();
    return taken != nullptr ? taken : Block::create(devices, device, whole);
  }

  // Any thread may call this, also the network's. The next take() frees the surplus, because the
  // driver waits for the device's work before it frees.
  void put_back(std::shared_ptr<const Block> block) {
    const std::lock_guard lock(mutex_);
    if (block->lent()) return spoiled_.push_back(std::move(block));
    idle_bytes_ += block->bytes();
    idle_.push_back(std::move(block));
  }

  std::uint64_t next_number() { return ++last_number_; }

  void add(const Block& block) {
    const std::lock_guard lock(mutex_);
    by_address_.emplace(block.data(), &block);
    if (block.number() != 0) by_number_.emplace(block.number(), &block);
    count_.store(by_address_.size(), std::memory_order_relaxed);
  }

  void remove(const Block& block) {
    const std::lock_guard lock(mutex_);
    by_address_.erase(block.data());
    count_.store(by_address_.size(), std::memory_order_relaxed);
    gone_.fetch_add(by_number_.erase(block.number()), std::memory_order_relaxed);
  }

  std::shared_ptr<const Block> at(const std::byte* bytes) {
    // A holder of a block's bytes knows that the block was added.
    if (count_.load(std::memory_order_relaxed) == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    auto found = by_address_.upper_bound(bytes);
    if (found == by_address_.begin()) return nullptr;
    const Block& block = *std::prev(found)->second;
    return bytes < block.data() + block.bytes() ? block.weak_from_this().lock() : nullptr;
  }

  std::shared_ptr<const Block> numbered(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = by_number_.find(number);
    return found == by_number_.end() ? nullptr : found->second->weak_from_this().lock();
  }

  std::uint64_t gone() const { return gone_.load(std::memory_order_relaxed); }

 private:
  std::mutex mutex_;
  HeldOverForks over_forks_{mutex_};
  std::map<const std::byte*, const Block*, std::less<>> by_address_;
  std::map<std::uint64_t, const Block*> by_number_;  // those that can be shared
  std::deque<std::shared_ptr<const Block>> idle_;
  std::size_t idle_bytes_ = 0;
  std::vector<std::shared_ptr<const Block>> spoiled_;  // that another process may still read
  std::atomic<std::uint64_t> last_number_{0};
  std::atomic<std::size_t> count_{0};
  std::atomic<std::uint64_t> gone_{0};
};

namespace {

// Returns a block with its last reference.
struct Return {
  std::shared_ptr<const Block> block;

  void operator()(void*) { Blocks::process().put_back(std::move(block)); }
};

}  // namespace

Block::Block(Devices& devices, int device, DeviceMemory memory, std::uint64_t number)
    : devices_(devices), device_(device), memory_(memory), number_(number) {}

std::shared_ptr<const Block> Block::create(Devices& devices, int device, std::size_t bytes) {
  const DeviceMemory memory = devices.allocate(device, bytes);
  const std::uint64_t number = memory.handle == 0 ? 0 : Blocks::process().next_number();
  const std::shared_ptr<const Block> block(new Block(devices, device, memory, number));
  Blocks::process().add(*block);
  return block;
}

std::shared_ptr<const Block> Block::map(Devices& devices, int device, const Descriptor& shared,
                                        std::size_t bytes) {
  const DeviceMemory memory = devices.map(device, shared, bytes);
  const std::shared_ptr<const Block> block(new Block(devices, device, memory, 0));
  Blocks::process().add(*block);
  return block;
}

Block::~Block() {
  Blocks::process().remove(*this);
  devices_.free(device_, memory_);
}

void Block::copy_to_host(std::span<const std::byte> bytes, std::byte* to) const {
  const Transfer transfer{bytes.data(), to, bytes.size()};
  devices_.stream(device_)->copy_to_host({&transfer, 1});
}

MutableBuffer allocate(Devices& devices, int device, std::size_t bytes) {
  std::shared_ptr<const Block> block = Blocks::process().take(devices, device, bytes);
  std::byte* data = block->data();
  return {std::shared_ptr<void>(data, Return{std::move(block)}), data, bytes};
}

std::shared_ptr<const Block> block_of(const std::byte* bytes) {
  return Blocks::process().at(bytes);
}

std::shared_ptr<const Block> block_numbered(std::uint64_t number) {
  return Blocks::process().numbered(number);
}

std::uint64_t blocks_gone() { return Blocks::process().gone(); }

std::optional<Place> place_of(const Buffer& bytes) {
  const Return* held = std::get_deleter<Return>(bytes.owner());
  if (held == nullptr || held->block->number() == 0) return std::nullopt;
  const auto offset = static_cast<std::size_t>(bytes.data() - held->block->data());
  return Place{held->block->number(), offset, {held->block, &held->block->lent()}};
}

Buffer copy_to_host(const Buffer& bytes, Allocator& allocator) {
  const MutableBuffer copy = allocator.allocate(bytes.size());
  block_of(bytes)->copy_to_host(bytes.span(), copy.data());
  return copy;
}

void bring_to_host(std::span<Buffer> parts, Allocator& allocator) {
  for (Buffer& bytes : parts) {
    if (block_of(bytes) != nullptr) bytes = copy_to_host(bytes, allocator);
  }
}

}  // namespace moolink::device
