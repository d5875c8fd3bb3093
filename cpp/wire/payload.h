#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "base/buffer.h"
#include "wire/path.h"

namespace moolink::wire {

// The numbers of segments that are blocks of a CUDA device's memory; the rest is the block's own.
inline constexpr std::uint64_t kDeviceSegments = std::uint64_t{1} << 63;

// A part whose memory the lender keeps: holders of the payload may only read it.
struct LentPart {
  std::uint32_t part = 0;
  std::uint64_t segment = 0;  // of the lender's lending pool; 0: elsewhere in its memory
  std::uint64_t offset = 0;   // in the segment
  // Not on the wire: the bytes were copied for the receiver, and no other code has them.
  bool copied = false;
  // Not on the wire. True while the receiver may read the memory; null for memory of the pool.
  std::shared_ptr<std::atomic<bool>> out = nullptr;

  // The sender has captured the bytes in memory of a device: the receiver owns the array that it
  // makes of them.
  bool captured() const { return (segment & kDeviceSegments) != 0; }

  auto fields() { return std::tie(part, segment, offset); }
};

// A grant that the receiver made in advance, and that the sender has filled.
struct StandingGrant {
  ConnectionId connection = 0;
  std::uint64_t grant = 0;  // its number in the connection
  bool named = false;       // a message that names it was written: it is the receiver's memory now
};

// A part whose bytes are in the memory of the message's receiver: over the connection of the grant
// only its number travels, over any other the bytes do.
struct PlacedPart {
  std::uint32_t part = 0;
  std::shared_ptr<StandingGrant> standing;
};

// The memory that both sides need for a part beside its bytes, for heads and lists. It counts
// in windows and limits, so that parts without bytes are not free.
inline constexpr std::size_t kPartCost = 256;

// The content of a message: an encoded value or struct, and the bytes of the tensors it refers to
// by index. Parts are separate so that each can be received straight into its final memory.
struct Payload {
  Buffer body;
  std::vector<Buffer> parts;
  // These are by rising part, and not among fields(): an encoding copies.
  std::vector<LentPart> lent = {};
  std::vector<PlacedPart> placed = {};
  // Of a received payload: parts that the sender may still write, so a value read there once must
  // not be trusted.
  std::vector<std::uint32_t> exposed = {};
  // Of a received payload: this peer has keys that its sender has not proven, so nothing in it may
  // run code.
  bool from_guest = false;

  std::size_t bytes() const {
    std::size_t total = body.size();
    for (const Buffer& part : parts) total += part.size();
    return total;
  }
  std::size_t cost() const { return bytes() + parts.size() * kPartCost; }
  // Null: the holder owns the part.
  const LentPart* find_lent(std::size_t part) const {
    const auto found =
        std::lower_bound(lent.begin(), lent.end(), part,
                         [](const LentPart& one, std::size_t number) { return one.part < number; });
    return found == lent.end() || found->part != part ? nullptr : &*found;
  }

  auto fields() { return std::tie(body, parts); }
};

// The same bytes in memory of its own: decoding a payload gives its parts away, so it copies parts
// that others may still read or send.
inline Payload private_copy(const Payload& payload, Allocator& allocator) {
  Payload copy{payload.body, {}};
  copy.parts.reserve(payload.parts.size());
  for (const Buffer& part : payload.parts) {
    copy.parts.push_back(moolink::private_copy(part, allocator));
  }
  copy.from_guest = payload.from_guest;
  return copy;
}

}  // namespace moolink::wire
