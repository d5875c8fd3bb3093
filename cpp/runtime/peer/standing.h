#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "base/buffer.h"
#include "base/uid.h"
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

// The one peer that a message is for, as its encoder needs it. To be used without the engine's
// lock.
class Recipient {
 public:
  // The sender and the name stay as long as this.
  Recipient(RpcPeer& sender, const std::string& name) : sender_(sender), peer_(&name) {}
  Recipient(RpcPeer& sender, const Uid& instance) : sender_(sender), peer_(instance) {}

  // Memory for a part of so many bytes; empty: there is none, the part travels as any other.
  std::optional<PlacedMemory> place(std::size_t bytes) const;
  // Whether parts may stay in a CUDA device's memory (device::allocate): the path to the peer reads
  // them there. Should it be lost they are brought to the host.
  bool reads_devices() const;

 private:
  template <class Use>
  auto with_peer(Use use) const;

  RpcPeer& sender_;
  std::variant<const std::string*, Uid> peer_;
};

PlacedMemory hold_grant(std::weak_ptr<RpcPeer> peer, wire::ConnectionId connection,
                        std::uint64_t grant, const MutableBuffer& memory);

}  // namespace moolink::runtime
