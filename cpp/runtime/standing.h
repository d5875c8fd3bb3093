#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "base/buffer.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::runtime {

class RpcPeer;

// Memory of the peer that a message is for: its bytes are captured straight into it. With the last
// copy of the buffer an unused grant goes back.
struct PlacedMemory {
  MutableBuffer memory;
  std::shared_ptr<wire::StandingGrant> standing;
};

// Memory for a part of so many bytes; empty: there is none, the part travels as any other. To be
// called without the engine's lock.
using PlaceMemory = std::function<std::optional<PlacedMemory>(std::size_t bytes)>;

PlacedMemory hold_grant(std::weak_ptr<RpcPeer> peer, wire::ConnectionId connection,
                        std::uint64_t grant, const MutableBuffer& memory);

}  // namespace moolink::runtime
