#include "base/buffer.h"
#include "base/format.h"
#include "base/names.h"
#include "base/random.h"
#include "base/streaming_copy.h"
#include "base/uid.h"
#include "check.h"

#include <algorithm>
#include <span>
#include <vector>

namespace moolink {

TEST("random: the same seed gives the same sequence") {
  Random a(7);
  Random b(7);
  Random c(8);
  for (int i = 0; i < 100; ++i) CHECK_EQ(a.next(), b.next());
  CHECK(a.next() != c.next());
}

TEST("uid: hexadecimal form and emptiness") {
  CHECK_EQ((Uid{0x0123456789abcdefULL, 0xfedcba9876543210ULL}.hex()),
           std::string("0123456789abcdeffedcba9876543210"));
  CHECK(Uid{}.empty());
  CHECK(Uid::from_entropy() != Uid::from_entropy());
}

TEST("seconds: three digits, and whole ones from 1000") {
  CHECK_EQ(in_seconds(milliseconds(1234)), std::string("1.23 s"));
  CHECK_EQ(in_seconds(milliseconds(999'400)), std::string("999 s"));
  CHECK_EQ(in_seconds(milliseconds(999'600)), std::string("1000 s"));
  CHECK_EQ(in_milliseconds(milliseconds(1500)), std::string("1500 ms"));
  CHECK_EQ(in_seconds(seconds(1040)), std::string("1040 s"));
  CHECK_EQ(grouped(0), std::string("0"));
  CHECK_EQ(grouped(999), std::string("999"));
  CHECK_EQ(grouped(1'000), std::string("1,000"));
  CHECK_EQ(grouped(-123'456), std::string("-123,456"));
  CHECK_EQ(grouped(1'234'567), std::string("1,234,567"));
}

TEST("heap allocator: blocks are 64-byte aligned, sized as asked") {
  HeapAllocator heap;
  for (const std::size_t size : {0UL, 1UL, 63UL, 64UL, 65UL, 4097UL}) {
    const MutableBuffer block = heap.allocate(size);
    CHECK_EQ(block.size(), size);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0UL);
  }
}

TEST("streaming copy: the same bytes past the cache as through it, at any alignment and size") {
  std::vector<std::byte> from(9 * 4096 + 100);
  Random random(11);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random.next());
  for (const std::size_t whole : {std::size_t{0}, std::size_t{1} << 40}) {
    for (const std::size_t offset : {0UL, 1UL, 63UL, 64UL}) {
      for (const std::size_t size : {0UL, 1UL, 4095UL, 4096UL, 4097UL, 3 * 4096UL, 9 * 4096UL}) {
        std::vector<std::byte> to(from.size(), std::byte{0xa5});
        streaming_copy(std::span(to).subspan(offset, size), std::span(from).subspan(7, size),
                       whole);
        CHECK(std::equal(to.begin() + static_cast<std::ptrdiff_t>(offset),
                         to.begin() + static_cast<std::ptrdiff_t>(offset + size),
                         from.begin() + 7));
        CHECK(offset == 0 || to[offset - 1] == std::byte{0xa5});
        CHECK(to[offset + size] == std::byte{0xa5});
      }
    }
  }
}

TEST("names: control characters of one byte and of two are none, and shown as one mark") {
  CHECK(is_name("caf\xc3\xa9 \xc2\xa0"));
  for (const char* bad : {"a\nb", "a\x7f", "\xc2\x9b", "a\xc2\x80z"}) CHECK(!is_name(bad));
  CHECK_EQ(in_one_line("a\n\xc2\x9b"
                       "b\x1b\xc2\xa0"),
           std::string("a??b?\xc2\xa0"));
  CHECK_EQ(in_one_line("\xc2"), std::string("\xc2"));
}

TEST("names: lists of names that differ are joined to texts that differ") {
  const auto join = [](auto... names) { return join_names({names...}); };
  CHECK(join("a/b", "c") != join("a", "b/c"));
  CHECK(join("segments:a", "b") != join("segments", "a", "b"));
  CHECK(join("a", "b") == join("a", "b"));
  CHECK_EQ(joined_names_text(join("a/b", "c")), std::string("a/b/c"));
}

}  // namespace moolink
