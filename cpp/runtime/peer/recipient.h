#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "base/buffer.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::runtime {

class RpcPeer;

// Memory of the receiver of a message: the message's bytes are captured straight into it. An unused
// grant is returned with the last copy of the buffer.
struct PlacedMemory {
  MutableBuffer memory;
  std::shared_ptr<wire::StandingGrant> standing;
};

// The one receiver of a message, as its encoder needs it. Use it without the engine's lock.
class Recipient {
 public:
  // The sender and the name outlive this.
  Recipient(RpcPeer& sender, const std::string& name) : sender_(sender), receiver_(&name) {}
  Recipient(RpcPeer& sender, const Uid& instance) : sender_(sender), receiver_(instance) {}

  // Memory for a part of that many bytes; empty: none, the part travels like any other.
  std::optional<PlacedMemory> place(std::size_t bytes) const;
  // Whether parts may stay in this CUDA device's memory (device::allocate), where the path to the
  // peer reads them. If that path is lost, they are copied to the host.
  bool reads_device(int device) const;

 private:
  RpcPeer& sender_;
  rpc::Receiver receiver_;
};

PlacedMemory hold_grant(std::weak_ptr<RpcPeer> peer, wire::ConnectionId connection,
                        std::uint64_t grant, const MutableBuffer& memory);

}  // namespace moolink::runtime
