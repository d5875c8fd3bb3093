#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "shm_subject.h"
#include "transport/grant_pool.h"
#include "transport/shm/grant_filler.h"
#include "transport/shm/segments.h"
#include "transport/shm/transport.h"

namespace moolink::transport {
namespace shm_grant_test {

using conformance::pattern;
using conformance::same_bytes;
using conformance::Side;
using conformance::wait_until;
using shm::Access;
using shm::GrantFiller;
using shm::PeerSegments;

Descriptor copy_of(const memory::Segment& segment) {
  return Descriptor(::fcntl(segment.descriptor(), F_DUPFD_CLOEXEC, 0));
}

TEST("grants: blocks do not overlap, are aligned, and are used again when released") {
  const auto pool = std::make_shared<GrantPool>();
  std::vector<Grant> blocks;
  std::set<std::pair<std::uint64_t, std::uint64_t>> places;
  for (int i = 0; i < 200; ++i) {
    auto block = pool->allocate(70000);
    CHECK(block.has_value());
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block->memory.data()) % 64, 0u);
    CHECK_EQ(block->memory.size(), 70000u);
    CHECK_EQ(block->place.bytes, 70000u);
    CHECK_EQ(block->place.offset % (1 << 17), 0u);  // the next power of two
    CHECK(places.emplace(block->place.segment, block->place.offset).second);
    blocks.push_back(std::move(*block));
  }
  std::set<std::uint64_t> segments;
  for (const auto& place : places) segments.insert(place.first);
  CHECK_EQ(segments.size(), (200u + 31) / 32);
  const std::byte* last = blocks.back().memory.data();
  blocks.pop_back();
  auto again = pool->allocate(100000);
  CHECK(again && again->memory.data() == last);  // the warmest
  CHECK(segments.contains(again->place.segment));
  CHECK(!pool->allocate(GrantPool::kLargestBlock + 1));
}

TEST("grants: much free memory goes back to the system") {
  const auto pool = std::make_shared<GrantPool>();
  std::vector<Grant> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(*pool->allocate(std::size_t{60} << 20));
  std::vector<std::uint64_t> made;
  for (const auto& block : blocks) made.push_back(block.place.segment);
  CHECK_EQ(pool->retired(), 0u);
  blocks.clear();
  CHECK_EQ(pool->retired(), 6u);  // 4 blocks of 64 MB are kept
  const auto is_kept = [&](std::uint64_t segment) { return pool->segment(segment) != nullptr; };
  CHECK_EQ(std::ranges::count_if(made, is_kept), 4);
  CHECK(std::ranges::count(made, pool->allocate(std::size_t{60} << 20)->place.segment) == 1);
}

TEST("grants: what was not used between two looks goes back to the system") {
  const auto pool = std::make_shared<GrantPool>();
  const std::size_t size = GrantPool::kSegmentBytes;
  {
    const auto first = pool->allocate(size);
    const auto second = pool->allocate(size);
  }
  CHECK(pool->retire_idle());  // both were in use meanwhile
  CHECK_EQ(pool->retired(), 0u);
  pool->allocate(size);  // the warm one
  CHECK(pool->retire_idle());
  CHECK_EQ(pool->retired(), 1u);
  CHECK(!pool->retire_idle());
  CHECK_EQ(pool->retired(), 2u);
  CHECK(pool->allocate(size).has_value());
}

TEST("grants: after the end of the connection a block is never given out again") {
  auto pool = std::make_shared<GrantPool>();
  auto block = pool->allocate(1000);
  std::memset(block->memory.data(), 7, 1000);
  pool->close();
  CHECK(!pool->allocate(1000));
  CHECK_EQ(static_cast<int>(block->memory.data()[999]), 7);  // it is the user's all the same
  const std::weak_ptr<GrantPool> watch = pool;
  pool.reset();
  block.reset();
  CHECK(watch.expired());
}

TEST("grants: buffers may be released on any thread") {
  const auto pool = std::make_shared<GrantPool>();
  for (int round = 0; round < 50; ++round) {
    std::vector<MutableBuffer> buffers;
    for (int i = 0; i < 20; ++i) buffers.push_back(pool->allocate(300000)->memory);
    std::thread other([mine = std::move(buffers)]() mutable { mine.clear(); });
    for (int i = 0; i < 20; ++i) CHECK(pool->allocate(300000).has_value());
    other.join();
  }
}

TEST("grants: a part is copied in slices, and a job survives the end of its segment") {
  GrantFiller filler;
  PeerSegments segments;
  const auto segment = memory::Segment::create(3 << 20, "moolink-test");
  segments.add({.access = Access::fill, .segment = 1}, copy_of(*segment));
  const Buffer bytes = pattern((2 << 20) + 5, 1);
  const wire::GrantPlace place{1, 1, 64, bytes.size()};
  CHECK_THROWS(filler.begin(place, segments.at({1, 1, 64, bytes.size() - 1}), bytes),
               ErrorCode::wire);
  CHECK(filler.idle());
  filler.begin(place, segments.at(place), bytes);
  filler.begin({2, 1, 0, 0}, segments.at({2, 1, 0, 0}), Buffer{});
  segments.remove({Access::fill, 1});
  CHECK(!filler.step());
  CHECK(!filler.step());
  CHECK_EQ(filler.step()->grant, 1u);
  CHECK_EQ(filler.step()->grant, 2u);
  CHECK(filler.idle());
  CHECK_EQ(std::memcmp(segment->data() + 64, bytes.data(), bytes.size()), 0);
  CHECK_EQ(static_cast<int>(segment->data()[63]), 0);
}

TEST("shm: parts go into grants, whose memory is the receiver's own") {
  Side sender(shm_subject());
  Side receiver(shm_subject());
  if (!conformance::connect(shm_subject(), sender, receiver)) return;
  CHECK(sender.connection().traits().grants);
  std::vector<Grant> grants;
  const std::size_t sizes[] = {1, 70000, 300000, 5 << 20, 300000, 0};
  for (const std::size_t size : sizes) {
    auto grant = receiver.connection().allocate_grant(size);
    CHECK(grant.has_value());
    CHECK_EQ(grant->memory.size(), size);
    grants.push_back(std::move(*grant));
  }
  // The sender has not turned its loop: it learns of the segments when it needs them.
  for (std::size_t i = 0; i < grants.size(); ++i) {
    sender.connection().fill_grant(grants[i].place, pattern(sizes[i], i));
  }
  CHECK(sender.filled.empty());  // never from inside fill_grant()
  wait_until(sender, receiver, [&] { return sender.filled.size() == grants.size(); });
  for (std::size_t i = 0; i < grants.size(); ++i) {
    CHECK_EQ(sender.filled[i].grant, grants[i].place.grant);
    CHECK(same_bytes(grants[i].memory, pattern(sizes[i], i)));
  }
  receiver.connection().close();
  wait_until(sender, receiver, [&] { return sender.closures.size() == 1; });
  CHECK(same_bytes(grants[3].memory, pattern(sizes[3], 3)));
}

TEST("shm: a grant in a segment that was never passed is a wire error") {
  Side sender(shm_subject());
  Side receiver(shm_subject());
  if (!conformance::connect(shm_subject(), sender, receiver)) return;
  CHECK_THROWS(sender.connection().fill_grant({1, 1, 0, 10}, pattern(10, 1)), ErrorCode::wire);
}

TEST("shm: a connection that ended gives and fills no grants") {
  Side sender(shm_subject());
  Side receiver(shm_subject());
  if (!conformance::connect(shm_subject(), sender, receiver)) return;
  auto grant = receiver.connection().allocate_grant(8 << 20);
  CHECK(grant.has_value());
  sender.connection().fill_grant(grant->place, pattern(8 << 20, 1));
  sender.connection().close();
  wait_until(sender, receiver, [&] { return receiver.closures.size() == 1; });
  CHECK(sender.filled.empty());
  CHECK(!receiver.connection().allocate_grant(10));
}

TEST("shm: released grant memory is retired at the sender too") {
  Side sender(shm_subject());
  Side receiver(shm_subject());
  if (!conformance::connect(shm_subject(), sender, receiver)) return;
  std::vector<Grant> grants;
  for (int i = 0; i < 6; ++i) {
    auto grant = receiver.connection().allocate_grant(std::size_t{60} << 20);
    CHECK(grant.has_value());
    grants.push_back(std::move(*grant));
  }
  std::vector<wire::GrantPlace> places;
  for (const Grant& grant : grants) places.push_back(grant.place);
  grants.clear();  // 2 of 6 are above what is kept
  receiver.send(conformance::message_frame(1, 10));
  wait_until(sender, receiver, [&] { return sender.frames.size() == 1; });
  receiver.turn();
  sender.turn();
  int known = 0;
  for (const wire::GrantPlace& place : places) {
    try {
      sender.connection().fill_grant(place, pattern(10, 1));
      ++known;
    } catch (const Exception& e) {
      CHECK(e.error().code == ErrorCode::wire);
    }
  }
  CHECK_EQ(known, 4);
}

}  // namespace shm_grant_test
}  // namespace moolink::transport
