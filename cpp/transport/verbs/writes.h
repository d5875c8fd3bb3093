#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "base/buffer.h"
#include "transport/verbs/packets.h"
#include "transport/verbs/queue_pair.h"
#include "transport/verbs/registrations.h"
#include "wire/path.h"

namespace moolink::transport::verbs {

// Parts on their way into the peer's grants: in pieces, one part after the other. Their bytes are
// held until the device has read them.
class Writes {
 public:
  Writes(Device& device, QueuePair& pair, PacketWriter& packets)
      : pair_(pair), packets_(packets), registrations_(device) {}

  void add(const wire::GrantPlace& place, Buffer bytes);
  bool idle() const { return waiting_.empty() && on_their_way_.empty(); }
  // Whether a piece could leave now.
  bool ready() const;
  // Lets one piece leave; true if it did. `written`: the place whose last piece this was.
  bool step(std::optional<wire::GrantPlace>& written);
  // Requests up to this one have ended.
  void ended(std::uint64_t request);
  // What has not left is not wanted any more.
  void clear_waiting() { waiting_.clear(); }
  // The device reads nothing any more.
  void clear();

 private:
  struct Part {
    wire::GrantPlace place;
    Buffer bytes;
    std::shared_ptr<const Region> region;  // null: its pieces are copied through slots
    std::size_t done = 0;
  };
  struct Piece {
    std::uint64_t request;
    std::shared_ptr<Part> part;
  };

  static constexpr std::size_t kPieceBytes = std::size_t{512} << 10;
  static constexpr std::size_t kPieces = 4;  // on their way

  QueuePair& pair_;
  PacketWriter& packets_;
  Registrations registrations_;
  std::deque<std::shared_ptr<Part>> waiting_;
  std::deque<Piece> on_their_way_;
};

}  // namespace moolink::transport::verbs
