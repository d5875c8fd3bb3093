#include "runtime/peer/recipient.h"

#include <utility>

#include "device/devices.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {
namespace {

struct HeldGrant : wire::StandingGrant {
  HeldGrant() = default;
  HeldGrant(const HeldGrant&) = delete;
  HeldGrant& operator=(const HeldGrant&) = delete;
  // On any thread, and in a forked child, which has no part in its parent's grants.
  ~HeldGrant() {
    if (named) return;
    const auto peer = owner.lock();
    if (peer == nullptr || peer->context()->abandoned() || peer->closed()) return;
    peer->context()->engine().loop().post(
        [peer, connection = connection, grant = grant] { peer->release(connection, grant); });
  }

  std::weak_ptr<RpcPeer> owner;
  std::shared_ptr<void> memory;  // keeps it mapped
};

}  // namespace

PlacedMemory hold_grant(std::weak_ptr<RpcPeer> peer, wire::ConnectionId connection,
                        std::uint64_t grant, const MutableBuffer& memory) {
  auto held = std::make_shared<HeldGrant>();
  held->connection = connection;
  held->grant = grant;
  held->owner = std::move(peer);
  held->memory = memory.owner();
  return {{held, memory.data(), memory.size()}, held};
}

std::optional<PlacedMemory> Recipient::place(std::size_t bytes) const {
  return sender_.place(receiver_, bytes);
}

bool Recipient::reads_device(int device) const {
  device::Devices::process().sharing_refusal(device);  // tries it, which is too long for the lock
  return sender_.reads_device(receiver_, device);
}

}  // namespace moolink::runtime
