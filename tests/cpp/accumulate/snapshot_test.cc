#include "accumulate/snapshot.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/limits.h"
#include "base/random.h"
#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::accumulate;

const Uid kFirst{1, 1};
const Uid kSecond{1, 2};

Buffer bytes(std::size_t size) {
  const MutableBuffer memory = HeapAllocator().allocate(size);
  Random random(size);
  for (std::size_t i = 0; i < size; ++i) memory.data()[i] = static_cast<std::byte>(random.next());
  return memory;
}

HeldSnapshot snapshot() {
  wire::Payload state{bytes(300), {bytes(5000), Buffer(), bytes(1024)}};
  HeldSnapshot held(describe({3, 17}, 0, state, 1024), state);
  held.add_checksums();
  return held;
}

SnapshotFetch make_fetch() { return {{3, 17}, std::make_shared<HeapAllocator>(), seconds(1)}; }

TEST("snapshot: all chunks make the same state, a few being asked for at a time") {
  const HeldSnapshot held = snapshot();
  SnapshotFetch fetch = make_fetch();
  const Time now(seconds(1));
  fetch.set_parents(now, {kFirst});
  auto requests = fetch.next_requests(now);
  CHECK(requests.size() == 1 && std::holds_alternative<FetchInfo>(requests[0].message));
  fetch.set_info(now, held.info());
  std::size_t asked = 0;
  for (requests = fetch.next_requests(now); !requests.empty();
       requests = fetch.next_requests(now)) {
    CHECK(requests.size() <= 4);
    for (const auto& request : requests) {
      const std::uint32_t chunk = std::get<FetchChunk>(request.message).chunk;
      CHECK(fetch.chunk(now, kFirst, chunk, held.chunk(chunk)));
      ++asked;
    }
  }
  CHECK_EQ(asked, held.chunks());
  CHECK(fetch.complete());
  const HeldSnapshot copy = fetch.finish();
  CHECK_EQ(copy.payload().parts.size(), std::size_t{3});
  for (std::size_t i = 0; i < copy.chunks(); ++i) {
    CHECK(std::ranges::equal(copy.chunk(i).span(), held.chunk(i).span()));
  }
}

TEST("snapshot: a description of more parts than a message has is refused") {
  SnapshotFetch fetch = make_fetch();
  const std::vector<std::uint64_t> segments(Limits().max_parts + 2, 0);
  CHECK_THROWS(fetch.set_info(Time(seconds(1)), {{3, 17}, 0, 1024, segments, {}}), ErrorCode::wire);
  CHECK(!fetch.info() && !fetch.complete());
}

class NoMemory final : public Allocator {
 public:
  MutableBuffer allocate(std::size_t) override { throw std::bad_alloc(); }
};

TEST("snapshot: one that there is no memory for is not there in part") {
  const Time now(seconds(1));
  SnapshotFetch fetch({3, 17}, std::make_shared<NoMemory>(), seconds(1));
  bool thrown = false;
  try {
    fetch.set_info(now, snapshot().info());
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown);
  CHECK(!fetch.info() && !fetch.complete());
  CHECK(!fetch.chunk(now, kFirst, 0, bytes(300)));
}

TEST("snapshot: a damaged chunk is asked for again, a silent parent is given up") {
  const HeldSnapshot held = snapshot();
  SnapshotFetch fetch = make_fetch();
  Time now(seconds(1));
  fetch.set_info(now, held.info());
  fetch.set_parents(now, {kFirst, kSecond});
  CHECK_EQ(fetch.next_requests(now).size(), std::size_t{4});
  const MutableBuffer damaged = HeapAllocator().allocate(held.chunk(2).size());
  std::memcpy(damaged.data(), held.chunk(2).data(), damaged.size());
  damaged.data()[7] ^= std::byte{1};
  CHECK(!fetch.chunk(now, kFirst, 2, damaged));
  CHECK(!fetch.has(2));
  CHECK(fetch.chunk(now, kFirst, 1, held.chunk(1)));
  CHECK_EQ(fetch.deadline(), now + seconds(1));
  CHECK(fetch.give_up(now, kFirst));
  for (const auto& request : fetch.next_requests(now)) {
    CHECK(request.parent == kSecond);
    CHECK(std::get<FetchChunk>(request.message).chunk != 1);
  }
  CHECK(!fetch.give_up(now, kSecond));
}

TEST("snapshot: a parent whose chunks never fit is given up, and for nobody else's misfits") {
  const HeldSnapshot held = snapshot();
  SnapshotFetch fetch = make_fetch();
  const Time now(seconds(1));
  fetch.set_info(now, held.info());
  fetch.set_parents(now, {kFirst, kSecond});
  for (int i = 0; i < 100; ++i) CHECK(!fetch.chunk(now, kSecond, 0, bytes(299)));
  CHECK(!fetch.is_parent_useless());
  int misfits = 0;
  for (; !fetch.is_parent_useless() && misfits < 1000; ++misfits) {
    CHECK(!fetch.next_requests(now).empty());
    CHECK(!fetch.chunk(now, kFirst, 0, bytes(299)));
  }
  CHECK_EQ(misfits, 8);
  CHECK(fetch.give_up(now, kFirst));
  CHECK(!fetch.is_parent_useless());
  CHECK(fetch.chunk(now, kSecond, 0, held.chunk(0)));
}

TEST("snapshot: a description that does not fit itself is refused before memory is taken") {
  for (int kind = 0; kind < 4; ++kind) {
    SnapshotInfo info = snapshot().info();
    if (kind == 0) info.segments[0] = std::uint64_t{1} << 60;
    if (kind == 1) info.chunk_bytes = 0;
    if (kind == 2) info.crc32c.pop_back();
    if (kind == 3) {
      info.segments[0] = std::uint64_t{1} << 30;
      info.chunk_bytes = 1;
      info.crc32c.clear();
    }
    SnapshotFetch fetch = make_fetch();
    CHECK_THROWS(fetch.set_info(Time(seconds(1)), info), ErrorCode::wire);
  }
}

}  // namespace
