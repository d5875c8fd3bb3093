// What befalls the pool of grants: forks of its process, and a system without memory.

#include "transport/grant_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "check.h"

#if MOOLINK_TEST_OWN_NEW
namespace {

// How many more allocations this thread gets; below 0: any number.
thread_local int allocations_left = -1;

}  // namespace

void* operator new(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// AddressSanitizer's version of this operator does not match the operator delete below.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace moolink::transport {
namespace {

constexpr std::size_t kSmall = 100'000;               // shares its segment with others
constexpr std::size_t kLarge = std::size_t{8} << 20;  // has one of its own

bool holds(const MutableBuffer& memory, int value) {
  return std::ranges::all_of(memory.span(),
                             [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

void fill(const MutableBuffer& memory, int value) {
  std::memset(memory.data(), value, memory.size());
}

// Whether a child of this process finds it so.
template <class Condition>
bool in_child(Condition condition) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(condition() ? 0 : 1);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A peer that maps every segment of the pool.
struct Peer {
  std::vector<std::shared_ptr<memory::Segment>> mapped;
  std::set<std::uint64_t> known;

  void learn(GrantPool& pool) {
    for (std::uint64_t number = 1; number < 200; ++number) {
      const auto segment = pool.segment(number);
      if (segment == nullptr) {
        known.erase(number);
      } else if (known.insert(number).second) {
        mapped.push_back(memory::Segment::map(Descriptor(::dup(segment->descriptor())),
                                              GrantPool::kLargestBlock));
        segment->close_descriptor();
      }
    }
  }
};

TEST("grants: neither side of a fork sees what the other writes") {
  for (const std::size_t size : {kSmall, kLarge}) {
    const auto pool = std::make_shared<GrantPool>();
    const MutableBuffer memory = pool->allocate(size)->memory;
    fill(memory, 1);
    CHECK(in_child([&] {
      const bool mine = holds(memory, 1);
      fill(memory, 2);
      return mine && holds(memory, 2);
    }));
    CHECK(holds(memory, 1));
    fill(memory, 3);
    CHECK(in_child([&] { return holds(memory, 3); }));
  }
}

TEST("grants: a peer fills a block on after a fork, and no later one shows in the child") {
  const auto pool = std::make_shared<GrantPool>();
  Peer peer;
  const auto block = pool->allocate(kLarge);
  peer.learn(*pool);
  CHECK(in_child([] { return true; }));
  std::memset(peer.mapped[0]->data(), 7, kLarge);
  CHECK(holds(block->memory, 7));
}

TEST("grants: what was in use at a fork is not given out again, and goes with its last block") {
  for (const std::size_t size : {kSmall, kLarge}) {
    const auto pool = std::make_shared<GrantPool>();
    Peer peer;
    std::vector<Grant> before;
    before.push_back(*pool->allocate(size));
    before.push_back(*pool->allocate(size));
    peer.learn(*pool);
    const std::set<std::uint64_t> old = peer.known;
    CHECK(in_child([&] {
      before.clear();
      return !pool->allocate(size);  // its peer is the parent's
    }));
    std::vector<Grant> after;
    for (int i = 0; i < 60; ++i) {
      after.push_back(*pool->allocate(size));
      CHECK(!old.contains(after.back().place.segment));
    }
    peer.learn(*pool);
    CHECK(std::ranges::includes(peer.known, old));
    before.clear();
    peer.learn(*pool);
    for (const std::uint64_t segment : old) CHECK(!peer.known.contains(segment));
    // What nobody used is used again.
    const std::size_t segments = peer.known.size();
    after.clear();
    CHECK(in_child([] { return true; }));
    for (int i = 0; i < 60; ++i) after.push_back(*pool->allocate(size));
    peer.learn(*pool);
    CHECK_EQ(peer.known.size(), segments);
  }
}

TEST("grants: blocks that outlive their connection are private, too") {
  const auto pool = std::make_shared<GrantPool>();
  auto block = pool->allocate(kSmall);
  pool->close();
  fill(block->memory, 1);
  CHECK(in_child([&] {
    fill(block->memory, 2);
    block.reset();
    return true;
  }));
  CHECK(holds(block->memory, 1));
  block.reset();
}

#if MOOLINK_TEST_OWN_NEW
TEST("grants: without memory no block is lost") {
  const auto pool = std::make_shared<GrantPool>();
  bool done = false;
  for (int most = 0; !done; ++most) {
    CHECK(most < 100);
    allocations_left = most;
    try {
      done = pool->allocate(kSmall).has_value();  // and released at once
      allocations_left = -1;
    } catch (const std::bad_alloc&) {
      allocations_left = -1;
    }
  }
  std::vector<Grant> all;
  for (std::size_t i = 0; i < GrantPool::kSegmentBytes >> 17; ++i) {
    all.push_back(*pool->allocate(kSmall));
    CHECK_EQ(all.back().place.segment, 1u);
  }
  allocations_left = 0;
  bool refused = false;
  try {
    refused = !pool->allocate(kSmall);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  all.clear();  // which needs none
  allocations_left = -1;
  CHECK(refused);
}
#endif

}  // namespace
}  // namespace moolink::transport
