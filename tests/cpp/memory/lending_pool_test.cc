#include "memory/lending_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/at_fork.h"
#include "base/error.h"
#include "check.h"
#include "memory/borrowed_segment.h"

namespace moolink::memory {
namespace {

constexpr std::size_t kLarge = LendingPool::kSegmentBytes;

TEST("lending pool: blocks are aligned, do not overlap, and are found") {
  const auto pool = std::make_shared<LendingPool>();
  std::vector<MutableBuffer> blocks;
  for (std::size_t i = 0; i < 200; ++i) {
    blocks.push_back(pool->allocate(i * 1000));
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(blocks.back().data()) % 64, 0u);
    std::memset(blocks.back().data(), static_cast<int>(i), blocks.back().size());
  }
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    const MutableBuffer& block = blocks[i];
    CHECK_EQ(static_cast<std::size_t>(block.data()[block.size() - 1]), i % 256);
    const auto place = pool->find(block.data() + 10, block.size() - 10);
    CHECK(place.has_value());
    CHECK(pool->segment(place->segment)->data() + place->offset == block.data() + 10);
  }
}

TEST("lending pool: other memory is not found, nor what sticks out") {
  const auto pool = std::make_shared<LendingPool>();
  const MutableBuffer other = HeapAllocator().allocate(100);
  CHECK(!pool->find(other.data(), 100));
  const MutableBuffer block = pool->allocate(kLarge);
  CHECK(!pool->find(other.data(), 100));
  CHECK(pool->find(block.data(), kLarge).has_value());
  CHECK(!pool->find(block.data(), kLarge + 1));
  CHECK(!pool->find(block.data() + 1, kLarge));
  CHECK(!pool->find(block.data() - 1, 2));
  CHECK(!pool->find(block.data(), ~std::size_t{0}));
}

TEST("lending pool: a released block is used again, the warmest first") {
  const auto pool = std::make_shared<LendingPool>();
  const std::byte* first = pool->allocate(100'000).data();
  CHECK(pool->allocate(70'000).data() == first);
  bool refused = false;
  try {
    pool->allocate(LendingPool::kLargestBlock + 1);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  CHECK(refused);
}

TEST("lending pool: much free memory goes back to the system, not what is in use") {
  const auto pool = std::make_shared<LendingPool>();
  std::vector<MutableBuffer> blocks;
  std::set<std::uint64_t> segments;
  for (int i = 0; i < 6; ++i) {
    blocks.push_back(pool->allocate(2 * kLarge));
    segments.insert(pool->find(blocks.back().data(), 1)->segment);
  }
  CHECK_EQ(segments.size(), 6u);
  MutableBuffer kept = blocks.front();
  blocks.clear();
  CHECK_EQ(pool->retired(), 1u);  // 4 of 128 MB are kept
  int left = 0;
  for (const std::uint64_t number : segments) left += pool->segment(number) != nullptr ? 1 : 0;
  CHECK_EQ(left, 5);
  const auto place = pool->find(kept.data(), 1);
  CHECK(place && pool->segment(place->segment) != nullptr);
}

TEST("lending pool: a block of a size that is kept stays, one for each token") {
  const auto pool = std::make_shared<LendingPool>();
  constexpr std::size_t kSize = 2 * LendingPool::kMaxFreeBytes;
  std::shared_ptr<void> token = pool->keep_one(kSize);
  const std::byte* last = nullptr;
  {
    const MutableBuffer first = pool->allocate(kSize);
    const MutableBuffer second = pool->allocate(kSize);
    last = first.data();  // released last
  }
  CHECK_EQ(pool->retired(), 1u);
  CHECK(pool->allocate(kSize).data() == last);
  token.reset();
  CHECK_EQ(pool->retired(), 2u);
}

TEST("lending pool: blocks outlive it, and may be released on any thread") {
  auto pool = std::make_shared<LendingPool>();
  const std::weak_ptr<LendingPool> watch = pool;
  for (int round = 0; round < 50; ++round) {
    std::vector<MutableBuffer> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(pool->allocate(300'000));
    std::thread other([mine = std::move(blocks)]() mutable { mine.clear(); });
    for (int i = 0; i < 20; ++i) pool->allocate(300'000);
    other.join();
  }
  MutableBuffer last = pool->allocate(1000);
  pool.reset();
  std::memset(last.data(), 7, 1000);
  last = {};
  CHECK(watch.expired());
}

TEST("a segment to lend can be mapped for reading, and for nothing else") {
  const auto made = Segment::create_to_lend(5000, "moolink-test");
  std::memcpy(made->data(), "hello", 5);  // its maker writes
  const auto duplicate = [&made] {
    return Descriptor(::fcntl(made->descriptor(), F_DUPFD_CLOEXEC, 0));
  };
  const auto mapped = Segment::map_read_only(duplicate(), 1 << 20);
  CHECK_EQ(std::memcmp(mapped->data(), "hello", 5), 0);
  std::memcpy(made->data(), "again", 5);
  CHECK_EQ(std::memcmp(mapped->data(), "again", 5), 0);
  CHECK_THROWS(Segment::map(duplicate(), 1 << 20), ErrorCode::error);  // the kernel refuses
  CHECK(::mprotect(mapped->data(), mapped->size(), PROT_READ | PROT_WRITE) != 0);
}

TEST("borrowed: a fork leaves buffers their bytes, and a reader of the whole the owner's memory") {
  const auto made = Segment::create_to_lend(1 << 16, "moolink-test");
  const auto set = [&](int value) { std::memset(made->data(), value, made->size()); };
  const auto is = [](std::byte byte, int value) { return byte == static_cast<std::byte>(value); };
  const auto in_child = [](auto condition) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(condition() ? 0 : 1);
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  auto borrowed = BorrowedSegment::map(Descriptor(::dup(made->descriptor())), 1 << 20);
  const LentBytes whole = borrowed->bytes();
  std::vector<Buffer> buffers;
  for (int value = 1; value <= 3; ++value) {
    set(value);
    buffers.push_back(borrowed->buffer(100, 50));
    const auto own_bytes = [&] {
      for (int i = 0; i < value; ++i) {
        if (!is(buffers[static_cast<std::size_t>(i)].data()[49], i + 1)) return false;
      }
      return true;
    };
    CHECK(in_child([&] { return own_bytes() && whole->empty(); }));
    set(9);
    CHECK(own_bytes());
    CHECK(is((*whole)[100], 9) && is(borrowed->buffer(100, 1).data()[0], 9));
  }
  borrowed.reset();
  set(5);
  CHECK(is((*whole)[0], 5));
}

// Stands for an engine, whose lock is taken before that of any memory.
class OnLocking final : public AtFork {
 public:
  explicit OnLocking(std::function<void()> call) : call_(std::move(call)) {
    join_forks(Rank::context);
  }
  ~OnLocking() { leave_forks(Rank::context); }

 private:
  void before_fork() noexcept override { call_(); }
  void after_fork_in_child() noexcept override {}

  std::function<void()> call_;
};

TEST("borrowed: a fork copies what is in use before it takes the engines' locks") {
  const auto made = Segment::create_to_lend(1 << 16, "moolink-test");
  std::memset(made->data(), 1, made->size());
  const auto borrowed = BorrowedSegment::map(Descriptor(::dup(made->descriptor())), 1 << 20);
  const Buffer buffer = borrowed->buffer(100, 50);
  const OnLocking engine([&] { std::memset(made->data(), 9, made->size()); });
  const pid_t child = ::fork();
  if (child == 0) ::_exit(buffer.data()[49] == std::byte{1} ? 0 : 1);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(buffer.data()[0] == std::byte{1});
  CHECK((*borrowed->bytes())[0] == std::byte{9});
}

TEST("borrowed: what is borrowed between the copy and the locks is copied, too") {
  const auto made = Segment::create_to_lend(1 << 16, "moolink-test");
  std::memset(made->data(), 1, made->size());
  const auto borrowed = BorrowedSegment::map(Descriptor(::dup(made->descriptor())), 1 << 20);
  Buffer first = borrowed->buffer(0, 50);
  Buffer second;
  const OnLocking engine([&] {
    first = {};
    second = borrowed->buffer(4000, 50);
  });
  const pid_t child = ::fork();
  if (child == 0) {
    std::memset(made->data(), 9, made->size());
    ::_exit(second.data()[49] == std::byte{1} ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST("only memory that cannot go away under a reader is mapped") {
  const Descriptor huge(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (!huge) return;  // a system without huge pages has nothing to refuse
  const std::size_t size = std::size_t{2} << 20;
  if (::ftruncate(huge.get(), static_cast<off_t>(size)) != 0) return;
  CHECK_EQ(::fcntl(huge.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  Descriptor passed(::fcntl(huge.get(), F_DUPFD_CLOEXEC, 0));
  CHECK_THROWS(Segment::map_read_only(std::move(passed), size), ErrorCode::wire);
}

}  // namespace
}  // namespace moolink::memory
