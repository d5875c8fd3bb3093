#include <fcntl.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "edges.h"
#include "io/doorbell.h"
#include "transport/shm/ring.h"

namespace moolink::transport::shm {
namespace shm_ring_test {

struct Ring {
  explicit Ring(std::size_t capacity)
      : segment(make_ring(capacity)),
        writer(segment, reader_bell.rung),
        reader(segment, writer_bell.rung) {
    CHECK(reader_rung.next() && writer_rung.next());  // the edges of the beginning
  }

  RingWords& words() { return *reinterpret_cast<RingWords*>(segment->data()); }
  io::Doorbell reader_bell = io::make_doorbell();
  io::Doorbell writer_bell = io::make_doorbell();
  check::Edges reader_rung{reader_bell.watched.get()};
  check::Edges writer_rung{writer_bell.watched.get()};
  std::shared_ptr<memory::Segment> segment;
  RingWriter writer;
  RingReader reader;
};

std::vector<std::byte> pattern(std::size_t size, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
  return bytes;
}

TEST("ring: capacity is a power of two within its limits") {
  CHECK_EQ(make_ring(1)->size(), 4096 + kSmallestRingBytes);
  CHECK_EQ(make_ring(70000)->size(), 4096u + (1u << 17));
  CHECK_EQ(make_ring(~std::size_t{0} / 4)->size(), 4096 + kLargestRingBytes);
}

TEST("ring: bytes come out as they went in, over many turns") {
  Ring ring(4096);
  Random random(1);
  const auto sent = pattern(200000, 2);
  std::vector<std::byte> got(sent.size());
  std::size_t written = 0;
  std::size_t read = 0;
  while (read < sent.size()) {
    const std::size_t want = std::min<std::size_t>(sent.size() - written, random.below(6000));
    const std::size_t took = ring.writer.write({sent.data() + written, want});
    CHECK(took <= want && took <= 4096);
    written += took;
    if (random.chance(1, 2)) ring.writer.publish();
    if (written == sent.size() || took < want) ring.writer.publish();
    const std::size_t space = std::min<std::size_t>(sent.size() - read, random.below(6000));
    read += ring.reader.read({got.data() + read, space});
    if (random.chance(1, 2)) ring.reader.release();
    if (written - read >= 4096 - 2048) ring.reader.release();
    CHECK(read <= written);
  }
  CHECK(got == sent);
  CHECK(!ring.reader.readable());
}

TEST("ring: what is not published is not seen, what is not released is not overwritten") {
  Ring ring(4096);
  const auto bytes = pattern(4096, 3);
  CHECK_EQ(ring.writer.write({bytes.data(), 100}), 100u);
  CHECK(!ring.reader.readable());
  ring.writer.publish();
  CHECK(ring.reader.readable());
  CHECK_EQ(ring.writer.write(bytes), 3996u);
  std::vector<std::byte> got(100);
  CHECK_EQ(ring.reader.read(got), 100u);
  CHECK_EQ(ring.writer.write(bytes), 0u);
  ring.reader.release();
  CHECK_EQ(ring.writer.write(bytes), 100u);
}

TEST("ring: one message at a time uses the first pages only") {
  Ring ring(kDefaultRingBytes);
  const auto bytes = pattern(1000, 9);
  std::vector<std::byte> got(bytes.size());
  for (int i = 0; i < 3000; ++i) {
    ring.writer.write(bytes);
    ring.writer.publish();
    CHECK_EQ(ring.reader.read(got), bytes.size());
    ring.reader.release();
    CHECK(got == bytes);
  }
  const std::byte* data = ring.segment->data() + 4096;
  const auto used = [](std::byte byte) { return byte != std::byte{0}; };
  CHECK(std::none_of(data + kRingRewindBytes + bytes.size(), data + kDefaultRingBytes, used));
}

TEST("ring: a base that lies leads to no byte outside of the ring") {
  Ring ring(4096);
  const auto bytes = pattern(3000, 10);
  ring.writer.write(bytes);
  ring.words().base.store(~std::uint64_t{0} - 5);
  ring.writer.publish();
  std::vector<std::byte> got(bytes.size());
  CHECK_EQ(ring.reader.read(got), bytes.size());
}

TEST("ring: skip drops bytes") {
  Ring ring(4096);
  const auto bytes = pattern(1000, 4);
  ring.writer.write(bytes);
  ring.writer.publish();
  CHECK_EQ(ring.reader.skip(900), 900u);
  std::vector<std::byte> got(200);
  CHECK_EQ(ring.reader.read(got), 100u);
  CHECK_EQ(std::memcmp(got.data(), bytes.data() + 900, 100), 0);
}

TEST("ring: the reader is rung once, and only when it sleeps") {
  Ring ring(4096);
  const auto bytes = pattern(10, 5);
  ring.writer.write(bytes);
  ring.writer.publish();
  CHECK(!ring.reader_rung.next());
  CHECK(!ring.reader.prepare_sleep());  // there are bytes
  CHECK_EQ(ring.reader.skip(10), 10u);
  CHECK(ring.reader.prepare_sleep());
  ring.writer.write(bytes);
  CHECK(!ring.reader_rung.next());
  ring.writer.publish();
  CHECK(ring.reader_rung.next());
  CHECK_EQ(ring.words().asleep.load(), 0u);
}

TEST("ring: the writer is rung once half of the ring is free") {
  Ring ring(4096);
  const auto bytes = pattern(5000, 6);
  CHECK_EQ(ring.writer.write(bytes), 4096u);
  CHECK(ring.writer.await_room());  // publishes too
  CHECK_EQ(ring.reader.skip(2000), 2000u);
  ring.reader.release();
  CHECK(!ring.writer_rung.next());
  CHECK_EQ(ring.reader.skip(48), 48u);
  ring.reader.release();
  CHECK(ring.writer_rung.next());
  CHECK_EQ(ring.writer.write(bytes), 2048u);
  CHECK_EQ(ring.reader.skip(4096), 2048u);
  ring.reader.release();
  CHECK(!ring.writer.await_room());  // there is room already
}

TEST("ring: a hostile position of the writer is a wire error") {
  for (const std::uint64_t bad : {std::uint64_t{4096 + 50 + 1}, ~std::uint64_t{0},
                                  std::uint64_t{49}, std::uint64_t{1} << 63}) {
    Ring ring(4096);
    const auto bytes = pattern(100, 7);
    ring.writer.write({bytes.data(), 50});
    ring.writer.publish();
    CHECK_EQ(ring.reader.skip(50), 50u);
    ring.reader.release();
    ring.words().tail.store(bad);
    std::vector<std::byte> got(100);
    CHECK_THROWS(ring.reader.read(got), ErrorCode::wire);
    CHECK_THROWS(ring.reader.readable(), ErrorCode::wire);
  }
}

TEST("ring: a hostile position of the reader is a wire error") {
  for (const std::uint64_t bad : {std::uint64_t{4097}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    Ring ring(4096);
    const auto bytes = pattern(4096, 8);
    ring.writer.write(bytes);
    ring.writer.publish();
    ring.words().head.store(bad);
    CHECK_THROWS(ring.writer.write(bytes), ErrorCode::wire);
  }
  Ring ring(4096);
  const auto bytes = pattern(4096, 9);
  ring.writer.write(bytes);
  ring.writer.publish();
  ring.words().head.store(1000);
  CHECK_EQ(ring.writer.write(bytes), 1000u);
  ring.writer.publish();
  ring.words().head.store(999);  // it went back
  CHECK_THROWS(ring.writer.write(bytes), ErrorCode::wire);
}

TEST("ring: a segment that cannot be a ring is refused") {
  CHECK_THROWS(map_ring(Descriptor()), ErrorCode::wire);
  for (const std::size_t size :
       {std::size_t{4096}, std::size_t{3 * 4096}, 4096 + 2 * kLargestRingBytes}) {
    const auto segment = memory::Segment::create(size, "moolink-test");
    const int copy = ::fcntl(segment->descriptor(), F_DUPFD_CLOEXEC, 0);
    if (size == 3 * 4096) {
      CHECK_EQ(map_ring(Descriptor(copy))->size(), size);  // 8192 is a power of two
    } else {
      CHECK_THROWS(map_ring(Descriptor(copy)), ErrorCode::wire);
    }
  }
}

TEST("ring: two threads that sleep whenever they must lose no byte and no wake-up") {
  Ring ring(4096);
  const auto sent = pattern(3 << 20, 10);
  std::thread writing([&] {
    Random random(11);
    std::size_t done = 0;
    while (done < sent.size()) {
      const std::size_t size = std::min<std::size_t>(sent.size() - done, 1 + random.below(9000));
      const std::size_t took = ring.writer.write({sent.data() + done, size});
      ring.writer.publish();
      done += took;
      if (took < size && ring.writer.await_room()) CHECK(ring.writer_rung.next(20000));
    }
  });
  std::vector<std::byte> got(sent.size());
  std::size_t done = 0;
  while (done < got.size()) {
    const std::size_t size = ring.reader.read({got.data() + done, got.size() - done});
    ring.reader.release();
    done += size;
    if (size == 0 && ring.reader.prepare_sleep()) {
      CHECK(ring.reader_rung.next(20000));
      ring.reader.wake();
    }
  }
  writing.join();
  CHECK(got == sent);
}

}  // namespace shm_ring_test
}  // namespace moolink::transport::shm
