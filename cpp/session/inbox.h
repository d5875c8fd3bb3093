#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/time.h"
#include "session/sequence_set.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::session {

// A body or part on its way in.
struct InboundPart {
  std::uint64_t size = 0;
  std::uint64_t received = 0;   // of a streamed part: chunks come in order
  bool complete = false;
  std::uint64_t grant = 0;      // not 0: `memory` is a grant of the message's connection
  MutableBuffer memory;         // where chunks or the grant's filler write
  Buffer bytes;                 // when complete
};

struct Inbound {
  std::uint16_t lane = 0;
  std::uint8_t kind = 0;
  std::uint64_t lane_prev = 0;
  Time deadline = kNever;
  std::uint32_t attempt = 0;
  wire::ConnectionId connection = 0;  // of that attempt
  std::size_t missing = 0;            // parts, the body among them
  std::uint64_t reserved = 0;         // bytes of parts outside the frame
  Error error;                        // no memory: parts are discarded
  InboundPart body;
  std::vector<InboundPart> parts;

  InboundPart* find(std::uint32_t part) {
    if (part == wire::kBodyPart) return &body;
    return part < parts.size() ? &parts[part] : nullptr;
  }
};

// Messages received: which are complete, which are in parts, which wait for their lane.
// Everything the peer says is checked; what breaks the protocol throws Exception{wire}.
class Inbox {
 public:
  Inbox(const Limits& limits, Allocator& allocator) : limits_(limits), allocator_(&allocator) {}

  const SequenceSet& complete() const { return complete_; }
  Inbound* find(std::uint64_t seq);

  // A message frame that is new, or a new attempt of an incomplete message. True: it is complete
  // now. The caller has dropped what is complete already, and attempts older than the known one.
  bool begin(std::uint64_t seq, std::uint16_t lane, const wire::MessageHead& head,
             const Buffer& payload, wire::ConnectionId connection, Time deadline);
  // Memory for a chunk; empty: discard it.
  std::span<std::byte> chunk_target(wire::ConnectionId connection, const wire::ChunkHead& head);
  // True: the message is complete now.
  bool chunk_received(wire::ConnectionId connection, const wire::ChunkHead& head);
  // The part's memory is a grant from now on.
  void granted(Inbound& inbound, std::uint32_t part, std::uint64_t grant, MutableBuffer memory);
  // The grant is filled. True: the message is complete now.
  bool filled(wire::ConnectionId connection, std::uint64_t grant, std::uint64_t& seq);

  // Marks seq as complete and calls deliver(Inbound&&) for it and for what waited for it in its
  // lane; a message whose lane is not that far waits.
  template <class Callback>
  void complete(std::uint64_t seq, Callback deliver) {
    for (std::uint64_t next = finish(seq); next != 0;) {
      auto node = inbounds_.extract(next);
      const std::uint64_t waiting = released(next, node.mapped());
      deliver(std::move(node.mapped()));
      next = waiting;
    }
  }

  // Grants that the connection's sender has not filled are abandoned with it.
  void disconnected(wire::ConnectionId connection);
  void clear();

 private:
  bool current(wire::ConnectionId connection, const wire::ChunkHead& head, const Inbound& inbound,
               const InboundPart& part) const;
  void restart(Inbound& inbound);
  void read_inline(const wire::MessageHead& head, const Buffer& payload, Inbound& inbound) const;
  void reserve(const wire::MessageHead& head, Inbound& inbound);
  // The message to deliver now: seq itself, or 0 if it waits for its lane.
  std::uint64_t finish(std::uint64_t seq);
  // Takes a message that is being delivered off the books; the one that waited for it, or 0.
  std::uint64_t released(std::uint64_t seq, const Inbound& inbound);

  Limits limits_;
  Allocator* allocator_;
  SequenceSet complete_;
  std::map<std::uint64_t, Inbound> inbounds_;             // incomplete, or waiting for their lane
  std::map<std::uint64_t, std::uint64_t> waiting_for_;    // lane_prev -> the one that waits for it
  std::map<std::pair<wire::ConnectionId, std::uint64_t>,
           std::pair<std::uint64_t, std::uint32_t>> grants_;  // connection, grant -> seq, part
  std::uint64_t reserved_ = 0;                            // of all inbounds_
};

}  // namespace moolink::session
