#include "memory/pool.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "base/random.h"
#include "check.h"

namespace moolink::memory {
namespace {

TEST("blocks are aligned, writable and as large as asked for") {
  Pool pool;
  for (const std::size_t size : {0, 1, 255, 256, 257, 320, 321, 4095, 65536, 65537, 3 << 20}) {
    const MutableBuffer block = pool.allocate(size);
    CHECK_EQ(block.size(), size);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0u);
    if (size > 0) std::memset(block.data(), 0xab, size);
  }
}

TEST("a freed block comes back warm, and only to its size class") {
  Pool pool;
  const std::byte* first = pool.allocate(100000).data();
  CHECK(pool.retained_bytes() >= 100000);
  const MutableBuffer other = pool.allocate(200000);
  CHECK(other.data() != first);
  const MutableBuffer again = pool.allocate(99000);
  CHECK(again.data() == first);
  CHECK(pool.allocate(99000).data() != first);
}

TEST("a block is the same memory for each of its owners, until it is given up") {
  std::weak_ptr<const void> lives;
  {
    Pool pool;
    MutableBuffer owned = pool.allocate(100'000);
    const Home first = home_of(owned);
    lives = first.lives;
    CHECK(first.memory.data() == owned.data());
    CHECK(first.memory.size() >= owned.size());
    CHECK(home_of(owned.slice(5000, 10)).lives == first.lives);
    owned = {};
    CHECK(!lives.expired());
    owned = pool.allocate(99'000);
    CHECK(home_of(owned).lives == first.lives);
    CHECK(home_of(pool.allocate(99'000)).lives != first.lives);
  }
  CHECK(lives.expired());
}

TEST("memory of no pool, and of a small block, is one while its owner lives") {
  Pool pool;
  const Buffer owned[] = {HeapAllocator().allocate(100'000), pool.allocate(1000)};
  for (const Buffer& bytes : owned) {
    const Home home = home_of(bytes.slice(10, 20));
    CHECK(home.lives == bytes.owner());
    CHECK(home.memory.data() == bytes.data() + 10);
    CHECK_EQ(home.memory.size(), std::size_t{20});
  }
  CHECK(home_of(Buffer()).lives == nullptr);
}

TEST("what is retained is bounded") {
  Pool pool(1 << 20);
  {
    std::vector<MutableBuffer> blocks;
    for (int i = 0; i < 100; ++i) blocks.push_back(pool.allocate(100000));
    CHECK_EQ(pool.retained_bytes(), 0u);
  }
  CHECK(pool.retained_bytes() > 0);
  CHECK(pool.retained_bytes() <= 1 << 20);
}

TEST("a block of a size that is kept is retained beyond the bound, one for each token") {
  Pool pool(1 << 20);
  constexpr std::size_t kSize = std::size_t{4} << 20;
  std::shared_ptr<void> token = pool.keep_one(kSize);
  std::shared_ptr<void> other = pool.keep_one(kSize);
  const auto three = [&pool] {
    std::vector<MutableBuffer> blocks;
    for (int i = 0; i < 3; ++i) blocks.push_back(pool.allocate(kSize));
    std::vector<std::weak_ptr<const void>> lives;
    for (const MutableBuffer& block : blocks) lives.push_back(home_of(block).lives);
    return lives;
  };
  const auto retained = [](const std::vector<std::weak_ptr<const void>>& lives) {
    return std::ranges::count_if(lives, [](const auto& life) { return !life.expired(); });
  };
  const auto lives = three();
  CHECK_EQ(retained(lives), 2);
  CHECK_EQ(pool.retained_bytes(), 0u);
  token.reset();
  CHECK_EQ(retained(lives), 1);
  other.reset();
  CHECK_EQ(retained(lives), 0);
  CHECK_EQ(pool.retained_bytes(), 0u);
}

TEST("a token changes what counts as retained, not how much is bounded") {
  Pool pool(1 << 20);
  const auto block_bytes = [&pool] {
    pool.allocate(300'000);
    return pool.retained_bytes();
  }();
  CHECK(block_bytes >= 300'000);
  std::shared_ptr<void> token = pool.keep_one(300'000);
  CHECK_EQ(pool.retained_bytes(), 0u);
  {
    const MutableBuffer first = pool.allocate(300'000);
    const MutableBuffer second = pool.allocate(300'000);
  }
  CHECK_EQ(pool.retained_bytes(), block_bytes);
  token.reset();
  CHECK_EQ(pool.retained_bytes(), 2 * block_bytes);
}

TEST("blocks outlive the pool and are freed on any thread") {
  std::vector<MutableBuffer> blocks;
  {
    Pool pool;
    Random random(1);
    for (int i = 0; i < 200; ++i) blocks.push_back(pool.allocate(random.below(100000)));
  }
  std::thread([blocks = std::move(blocks)]() mutable { blocks.clear(); }).join();
}

TEST("live blocks never overlap under concurrent use") {
  Pool pool;
  std::vector<std::thread> threads;
  std::atomic<int> clashes{0};
  for (unsigned char t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      std::vector<MutableBuffer> mine;
      for (int i = 0; i < 3000; ++i) {
        mine.push_back(pool.allocate(1 + random.below(5000)));
        std::memset(mine.back().data(), t, mine.back().size());
        if (mine.size() < 20) continue;
        const std::size_t victim = random.below(mine.size());
        for (const std::byte byte : mine[victim].span()) clashes += byte != std::byte{t};
        mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(victim));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(clashes.load(), 0);
}

}  // namespace
}  // namespace moolink::memory
