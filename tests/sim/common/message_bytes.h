#pragma once

// Bytes of simulated messages: made from a number, compared when they arrive, and written over by
// the receiver, whose memory they then are.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/buffer.h"
#include "base/random.h"
#include "common/simulation.h"

namespace moolink::sim {

inline Buffer make_bytes(std::uint64_t number, std::size_t size) {
  const MutableBuffer buffer = HeapAllocator().allocate(size);
  Random random(number);
  for (std::size_t at = 0; at < size; at += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(buffer.data() + at, &word, std::min<std::size_t>(8, size - at));
  }
  return buffer;
}

inline bool same_bytes(const Buffer& a, const Buffer& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

// Delivered memory belongs to the user, who writes into it: nothing else may, ever after.
class OwnedMemory {
 public:
  void take(const Buffer& buffer) {
    std::memset(const_cast<std::byte*>(buffer.data()), kMark, buffer.size());
    buffers_.push_back(buffer);
  }
  void check() const {
    for (const Buffer& buffer : buffers_) {
      const auto foreign = [](std::byte byte) { return byte != std::byte{kMark}; };
      require(std::none_of(buffer.span().begin(), buffer.span().end(), foreign),
              "memory was written after it was delivered");
    }
  }

 private:
  static constexpr unsigned char kMark = 0xee;
  std::vector<Buffer> buffers_;
};

}  // namespace moolink::sim
