#include "memory/pool.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/at_fork.h"

namespace moolink::memory {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kSmallest = 256;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;  // larger blocks are mapped
// Only larger blocks have a tracked identity (home_of).
constexpr std::size_t kSmallestHome = std::size_t{64} << 10;
constexpr std::size_t kClasses = 4 * 48;
constexpr std::size_t kLargest = std::size_t{1} << 48;

struct SizeClass {
  std::size_t index;
  std::size_t bytes;
};

// Four classes a power of two: at most a quarter of a block is unused.
SizeClass size_class(std::size_t size) {
  if (size <= kSmallest) return {0, kSmallest};
  const std::size_t power = std::bit_floor(size - 1);  // power < size <= 2 * power
  const std::size_t quarter = power / 4;
  const std::size_t step = (size - power + quarter - 1) / quarter;  // 1..4
  const auto exponent = static_cast<std::size_t>(std::countr_zero(power / kSmallest));
  return {4 * exponent + step, power + step * quarter};
}

std::byte* obtain(std::size_t bytes) {
  if (bytes < kHugePage) {
    // Whole pages if a device may read them (home_of): it gets no part of another owner's memory.
    void* block = std::aligned_alloc(bytes < kSmallestHome ? kAlignment : kPage, bytes);
    if (block == nullptr) throw std::bad_alloc();
    return static_cast<std::byte*>(block);
  }
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) throw std::bad_alloc();
  // Fewer page faults at the first write; harmless if the system has no huge pages.
  madvise(block, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(block);
}

void give_up(std::byte* block, std::size_t bytes) {
  if (bytes < kHugePage) {
    std::free(block);
  } else {
    munmap(block, bytes);
  }
}

}  // namespace

// A forked child keeps no blocks: each is returned to the system when it is released, without the
// locks, which other threads of the parent may have held.
class Pool::Shelves {
 public:
  struct Block {
    std::byte* memory = nullptr;
    std::shared_ptr<const void> lives;  // null: a small one
  };

  // Returns a block with its last reference.
  struct Return {
    std::shared_ptr<Shelves> shelves;
    SizeClass of;
    Block block;

    void operator()(void*) noexcept { shelves->put_back(of, std::move(block)); }
  };

  explicit Shelves(std::size_t retain_bytes) : retain_bytes_(retain_bytes) {}

  ~Shelves() {
    if (forked_) return;
    for (Shelf& shelf : shelves_) {
      for (Block& block : shelf.blocks) destroy(std::move(block), shelf.bytes);
    }
  }

  Block take(const SizeClass& wanted) {
    Shelf& shelf = shelves_[wanted.index];
    if (!forked_) {
      const std::lock_guard guard(shelf.mutex);
      if (!shelf.blocks.empty()) return take_from(shelf, wanted.bytes);
    }
    Block block;
    if (wanted.bytes >= kSmallestHome) block.lives = std::make_shared<char>();
    block.memory = obtain(wanted.bytes);
    return block;
  }

  void put_back(const SizeClass& of, Block block) noexcept {
    if (forked_) return destroy(std::move(block), of.bytes);
    {
      Shelf& shelf = shelves_[of.index];
      const std::lock_guard guard(shelf.mutex);
      const bool counts = shelf.blocks.size() >= shelf.kept;
      if (!counts || retained_.fetch_add(of.bytes) + of.bytes <= retain_bytes_) {
        try {
          shelf.bytes = of.bytes;
          shelf.blocks.push_back(std::move(block));
          return;
        } catch (const std::bad_alloc&) {
          // No room in the shelf: the block is destroyed below.
        }
      }
      if (counts) retained_ -= of.bytes;
    }
    destroy(std::move(block), of.bytes);
  }

  void keep_one_more(const SizeClass& of) noexcept {
    if (forked_) return;
    Shelf& shelf = shelves_[of.index];
    const std::lock_guard guard(shelf.mutex);
    if (shelf.blocks.size() > shelf.kept++) retained_ -= of.bytes;  // this one counted until now
  }

  void keep_one_less(const SizeClass& of) noexcept {
    if (forked_) return;
    Block surplus;
    {
      Shelf& shelf = shelves_[of.index];
      const std::lock_guard guard(shelf.mutex);
      if (shelf.blocks.size() < shelf.kept--) return;
      retained_ += of.bytes;
      surplus = take_from(shelf, of.bytes);
    }
    put_back(of, std::move(surplus));
  }

  std::size_t retained() const { return retained_; }

 private:
  struct Shelf {
    std::mutex mutex;
    std::size_t bytes = 0;
    std::size_t kept = 0;  // tokens; as many blocks do not count as retained
    std::vector<Block> blocks;
  };

  // Needs the shelf's lock; the shelf is not empty. The last block freed is the warmest.
  Block take_from(Shelf& shelf, std::size_t bytes) noexcept {
    if (shelf.blocks.size() > shelf.kept) retained_ -= bytes;
    Block block = std::move(shelf.blocks.back());
    shelf.blocks.pop_back();
    return block;
  }

  // Holders of the block's identity see that it is gone before other memory can take its place.
  static void destroy(Block block, std::size_t bytes) noexcept {
    block.lives.reset();
    give_up(block.memory, bytes);
  }

  const std::size_t retain_bytes_;
  ForkedSince forked_;
  std::atomic<std::size_t> retained_{0};
  std::array<Shelf, kClasses> shelves_;
};

Pool::Pool(std::size_t retain_bytes) : shelves_(std::make_shared<Shelves>(retain_bytes)) {}
Pool::~Pool() = default;

MutableBuffer Pool::allocate(std::size_t size) {
  if (size > kLargest) throw std::bad_alloc();
  const SizeClass wanted = size_class(size);
  Shelves::Block block = shelves_->take(wanted);
  std::byte* memory = block.memory;
  // If the control block cannot be allocated, shared_ptr runs the deleter: the block is not lost.
  std::shared_ptr<void> owner(memory, Shelves::Return{shelves_, wanted, std::move(block)});
  return {std::move(owner), memory, size};
}

std::shared_ptr<void> Pool::keep_one(std::size_t size) {
  if (size > kLargest) throw std::bad_alloc();
  const SizeClass of = size_class(size);
  shelves_->keep_one_more(of);
  return {nullptr, [shelves = shelves_, of](void*) { shelves->keep_one_less(of); }};
}

Home home_of(const Buffer& bytes) {
  const auto* held = std::get_deleter<Pool::Shelves::Return>(bytes.owner());
  if (held == nullptr || held->block.lives == nullptr) return {bytes.owner(), bytes.span()};
  return {held->block.lives, {held->block.memory, held->of.bytes}};
}

std::size_t Pool::retained_bytes() const { return shelves_->retained(); }

}  // namespace moolink::memory
