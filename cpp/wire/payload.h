#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "wire/path.h"

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

// A grant that the receiver has given before it was asked for one, and that the sender has filled.
struct StandingGrant {
  ConnectionId connection = 0;
  std::uint64_t grant = 0;  // its number in the connection
  bool named = false;       // a message that names it was written: it is the receiver's memory now
};

// A part whose bytes lie in the memory of the peer that the message is for: over the connection of
// the grant only its number travels, over any other the bytes do.
struct PlacedPart {
  std::uint32_t part = 0;
  std::shared_ptr<StandingGrant> standing;
};

// What both sides keep of a part beside its bytes, at most: its place in heads and lists. It counts
// in windows and limits, lest parts without bytes cost nothing.
inline constexpr std::size_t kPartCost = 256;

// What a message carries: an encoded value or struct, and the bytes of the tensors it refers to by
// index. Parts are kept apart so that each can be received straight into its final memory.
struct Payload {
  Buffer body;
  std::vector<Buffer> parts;
  // These are by rising part, and not among fields(): an encoding copies.
  std::vector<LentPart> lent = {};
  std::vector<PlacedPart> placed = {};
  // Of one that was received: where the sender may still write, so that nobody is
  // to believe what he has read there once.
  std::vector<std::uint32_t> exposed = {};

  std::size_t bytes() const {
    std::size_t total = body.size();
    for (const Buffer& part : parts) total += part.size();
    return total;
  }
  std::size_t cost() const { return bytes() + parts.size() * kPartCost; }
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
