#include "base/buffer.h"
#include "base/random.h"
#include "base/uid.h"
#include "check.h"

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

TEST("heap allocator: blocks are 64-byte aligned, sized as asked") {
  HeapAllocator heap;
  for (const std::size_t size : {0UL, 1UL, 63UL, 64UL, 65UL, 4097UL}) {
    const MutableBuffer block = heap.allocate(size);
    CHECK_EQ(block.size(), size);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 64, 0UL);
  }
}

}  // namespace moolink
