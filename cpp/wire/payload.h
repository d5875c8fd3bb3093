#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer.h"

namespace moolink::wire {

// A part whose memory stays its lender's: whoever has the payload may only read it.
struct LentPart {
  std::uint32_t part = 0;
  std::uint64_t segment = 0;  // of the lender's lending pool; 0: elsewhere in its memory
  std::uint64_t offset = 0;   // in the segment
  // Not on the wire: the bytes have been copied for the receiver, nobody else has them.
  bool copied = false;

  template <class Fields>
  void fields(Fields& f) {
    f(part, segment, offset);
  }
};

// What a message carries: an encoded value or struct, and the bytes of the tensors it refers to by
// index. Parts are kept apart so that each can be received straight into its final memory.
struct Payload {
  Buffer body;
  std::vector<Buffer> parts;
  std::vector<LentPart> lent = {};  // by rising part; not among fields(): an encoding copies

  std::size_t bytes() const {
    std::size_t total = body.size();
    for (const Buffer& part : parts) total += part.size();
    return total;
  }
  // Null: the part is its holder's own.
  const LentPart* find_lent(std::size_t part) const {
    const auto found =
        std::lower_bound(lent.begin(), lent.end(), part,
                         [](const LentPart& one, std::size_t number) { return one.part < number; });
    return found == lent.end() || found->part != part ? nullptr : &*found;
  }

  template <class Fields>
  void fields(Fields& f) {
    f(body, parts);
  }
};

// The same bytes in memory of its own: decoding a payload gives its parts away, so what others may
// still read or send is copied first.
Payload private_copy(const Payload& payload, Allocator& allocator);

}  // namespace moolink::wire
