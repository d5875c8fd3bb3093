#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "check.h"

namespace moolink::memory {
namespace {

Descriptor duplicate(int descriptor) { return Descriptor(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0)); }

Descriptor unsealed_memfd(std::size_t size) {
  Descriptor descriptor(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(::ftruncate(descriptor.get(), static_cast<off_t>(size)), 0);
  return descriptor;
}

TEST("a segment is zero, whole pages, and shared by its mappings") {
  const auto made = Segment::create(5000, "moolink-test");
  CHECK_EQ(made->size(), round_to_pages(5000));
  for (const std::byte byte : made->bytes()) CHECK(byte == std::byte{0});
  const auto mapped = Segment::map(duplicate(made->descriptor()), 1 << 20);
  CHECK_EQ(mapped->size(), made->size());
  CHECK(mapped->data() != made->data());
  std::memcpy(made->data() + 4990, "hello", 5);
  CHECK_EQ(std::memcmp(mapped->data() + 4990, "hello", 5), 0);
}

TEST("a buffer keeps its segment mapped") {
  auto made = Segment::create(4096, "moolink-test");
  const std::weak_ptr<Segment> watch = made;
  MutableBuffer buffer = made->buffer(64, 128);
  made.reset();
  CHECK(!watch.expired());
  std::memset(buffer.data(), 1, buffer.size());
  buffer = {};
  CHECK(watch.expired());
}

TEST("nobody can shrink, grow or unseal a segment") {
  const auto made = Segment::create(8192, "moolink-test");
  CHECK(::ftruncate(made->descriptor(), 4096) != 0);
  CHECK(::ftruncate(made->descriptor(), 16384) != 0);
  CHECK(::fcntl(made->descriptor(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
}

TEST("a descriptor that is no sealed segment of an allowed size is refused") {
  CHECK_THROWS(Segment::map(Descriptor(), 1 << 20), ErrorCode::wire);
  CHECK_THROWS(Segment::map(Descriptor(::open("/dev/null", O_RDWR | O_CLOEXEC)), 1 << 20),
               ErrorCode::wire);
  CHECK_THROWS(Segment::map(unsealed_memfd(4096), 1 << 20), ErrorCode::wire);
  Descriptor half_sealed = unsealed_memfd(4096);
  CHECK_EQ(::fcntl(half_sealed.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  CHECK_THROWS(Segment::map(std::move(half_sealed), 1 << 20), ErrorCode::wire);
  Descriptor odd = unsealed_memfd(4097);
  CHECK_EQ(::fcntl(odd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  CHECK_THROWS(Segment::map(std::move(odd), 1 << 20), ErrorCode::wire);
  const auto large = Segment::create(1 << 20, "moolink-test");
  CHECK_THROWS(Segment::map(duplicate(large->descriptor()), 1 << 19), ErrorCode::wire);
}

TEST("a segment of no or of absurd size is an error") {
  CHECK_THROWS(Segment::create(0, "moolink-test"), ErrorCode::invalid_argument);
  CHECK_THROWS(Segment::create(~std::size_t{0}, "moolink-test"), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace moolink::memory
