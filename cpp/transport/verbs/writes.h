#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/buffer.h"
#include "transport/verbs/packets.h"
#include "transport/verbs/queue_pairs.h"
#include "transport/verbs/registrations.h"
#include "wire/path.h"

namespace moolink::transport::verbs {

// Outgoing parts for the peer's grants, in pieces. Their bytes are held until the device has read
// them. Parts of one piece, and bytes that must be copied, go one after the other over the first
// queue pair, which carries the stream of frames too. Parts of several pieces go over all others at
// once, so that no small part waits for them. Each of these queue pairs keeps only its own order:
// after the last piece, a mark follows on each that carried one.
class Writes {
 public:
  Writes(Registrations& sources, QueuePairs& pairs, PacketWriter& packets)
      : sources_(sources), pairs_(pairs), packets_(packets), on_their_way_(pairs.size()) {}

  void add(const wire::GrantPlace& place, Buffer bytes);
  // Whether something could leave now.
  bool ready() const { return whole_ready() || spread_pair().has_value(); }
  // Sends a piece or a mark; true if one was sent. `written`: the place whose last it was.
  bool step(std::optional<wire::GrantPlace>& written);
  // Requests of a queue pair up to this one have ended.
  void ended(std::size_t pair, std::uint64_t request);
  // Drops what has not left.
  void clear_waiting();
  // The device does not read any more.
  void clear();

 private:
  struct Part {
    wire::GrantPlace place;
    Buffer bytes;
    std::shared_ptr<const Region> region;  // null: its pieces are copied through slots
    std::size_t done = 0;
    std::vector<bool> unmarked;  // queue pairs that had a piece of it and no mark yet

    bool has_left() const { return done == bytes.size(); }
  };
  struct Piece {
    std::uint64_t request;
    std::shared_ptr<Part> part;
  };

  bool whole_ready() const;
  std::optional<wire::GrantPlace> step_whole();
  // The queue pair for the next step of the first part of several pieces.
  std::optional<std::size_t> spread_pair() const;
  std::optional<wire::GrantPlace> step_spread(std::size_t pair);
  void post(std::size_t pair, const std::shared_ptr<Part>& part, std::span<const std::byte> from,
            std::uint32_t key);

  static constexpr std::size_t kPieceBytes = std::size_t{512} << 10;
  static constexpr std::size_t kPieces = 4;  // in transit over the first queue pair, or the others

  // Over one of the others: the next one is posted when the device has finished one.
  std::size_t most_pieces() const {
    return std::max<std::size_t>(2, kPieces / (pairs_.size() - 1));
  }

  Registrations& sources_;
  QueuePairs& pairs_;
  PacketWriter& packets_;
  std::deque<std::shared_ptr<Part>> whole_;   // over the first queue pair
  std::deque<std::shared_ptr<Part>> spread_;  // over the others
  std::vector<std::deque<Piece>> on_their_way_;
};

}  // namespace moolink::transport::verbs
