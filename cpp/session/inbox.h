#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
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

// An incoming body or part.
struct InboundPart {
  enum class How : std::uint8_t { in_frame, stream, to_be_granted, asked, granted, lent, placed };
  How how = How::in_frame;
  bool complete = false;
  std::uint64_t size = 0;
  std::uint64_t announced = 0;  // bytes of a streamed part; chunks are announced in order
  std::uint64_t received = 0;   // bytes of its chunks; these end in any order
  std::uint64_t grant = 0;
  std::uint64_t loan = 0;  // its number as a loan, in this attempt or an earlier one
  MutableBuffer memory;    // where chunks or the grant's filler write; empty: discarded
  Buffer bytes;            // when complete

  // Whether its sender may still write its memory.
  bool is_exposed() const { return how == How::granted || how == How::placed || how == How::lent; }
};

struct Inbound {
  std::uint16_t lane = 0;
  std::uint8_t kind = 0;
  std::uint64_t lane_prev = 0;
  Time deadline = kNever;
  std::uint32_t attempt = 0;
  wire::ConnectionId connection = 0;  // of that attempt
  std::size_t missing = 0;            // parts, the body among them
  std::uint64_t reserved = 0;         // memory reserved for it
  bool large = false;                 // by its bytes
  Error error;                        // no memory: parts are discarded
  InboundPart body;
  std::vector<InboundPart> parts;
  std::vector<wire::LentPart> lent;

  InboundPart* find(std::uint32_t part) {
    if (part == wire::kBodyPart) return &body;
    return part < parts.size() ? &parts[part] : nullptr;
  }
};

// Messages received: complete ones, partial ones, and those that wait for their lane. Everything
// the peer sends is checked; a violation of the protocol throws Exception{wire}.
class Inbox {
 public:
  Inbox(const Limits& limits, Allocator& allocator) : limits_(limits), allocator_(&allocator) {}

  const SequenceSet& complete() const { return complete_; }
  Inbound* find(std::uint64_t seq);

  // A message frame: new, or a later attempt of an incomplete message. The caller has dropped
  // complete messages, and attempts not later than the known one.
  void accept(std::uint64_t seq, std::uint16_t lane, const wire::MessageHead& head,
              const Buffer& payload, wire::ConnectionId connection, Time deadline);
  // Memory for a chunk; empty: the part has none, so discard the bytes. nullopt: no part awaits the
  // chunk, so discard it without chunk_received().
  std::optional<std::span<std::byte>> chunk_target(wire::ConnectionId connection,
                                                   const wire::ChunkHead& head);
  void chunk_received(wire::ConnectionId connection, const wire::ChunkHead& head);

  // The sender asks for a grant. False: not wanted any more.
  bool wanted(wire::ConnectionId connection, const wire::Want& want);
  // The part's memory is a grant from now on, or, if none was available, chunks will come. False:
  // the part is not awaited any more, and the memory is released.
  bool granted(wire::ConnectionId connection, std::uint64_t seq, std::uint32_t part,
               std::uint64_t grant, MutableBuffer memory);
  // Ends all writes to it. Returns the size of the part; 0: it was a standing grant that the sender
  // does not need.
  std::uint64_t filled(wire::ConnectionId connection, std::uint64_t grant);
  // Whether the sender may be filling grants of the message.
  bool has_open_grants(const Inbound& inbound) const;

  // Memory that the sender may fill before it sends, and then place in a message.
  void stand(wire::ConnectionId connection, std::uint64_t grant, MutableBuffer memory);
  std::size_t standing() const { return standing_.size(); }
  struct Standing {
    std::size_t grants = 0;
    std::size_t bytes = 0;
  };
  Standing standing(wire::ConnectionId connection) const;
  // Sizes of the parts that the last message had placed.
  std::vector<std::uint64_t> take_placed() { return std::exchange(placed_, {}); }

  // A part in the sender's memory.
  struct ToMap {
    std::uint64_t seq;
    std::uint32_t part;
    wire::LoanPlace place;
  };
  // Those of the last message; mapped() answers each.
  std::vector<ToMap> take_to_map() { return std::exchange(to_map_, {}); }
  // The part's memory here, or why there is none.
  void mapped(wire::ConnectionId connection, std::uint64_t seq, std::uint32_t part, Buffer bytes,
              const Error& error);
  // No reference to the loan is left here. False: it was not given, or has ended before.
  bool end_loan(std::uint64_t loan) { return borrowed_.erase(loan) == 1; }
  std::size_t borrowed() const { return borrowed_.size(); }
  // Loans of messages that finally arrived as bytes.
  std::vector<std::uint64_t> take_unused_loans() { return std::exchange(unused_loans_, {}); }

  // Complete messages whose turn in their lane has come; the caller delivers and clears them.
  std::vector<Inbound>& ready() { return ready_; }
  // How many messages have become complete since the last call.
  std::uint32_t take_completed() { return std::exchange(completed_, 0); }

  // Grants that the connection's sender has not filled are abandoned with it.
  void disconnected(wire::ConnectionId connection);
  void clear();

 private:
  void read_parts(const wire::MessageHead& head, const Buffer& payload, Inbound& inbound);
  void reserve(std::uint64_t bytes, Inbound& inbound);
  // The counter of inbounds_'s messages of this one's size class.
  std::uint64_t& held(const Inbound& inbound);
  void take_standing(const wire::PartHead& head, const Inbound& inbound, InboundPart& part);
  void place(const wire::PartHead& head, Inbound& inbound, InboundPart& part);
  void borrow(const wire::MessageHead& head, std::uint64_t seq, Inbound& inbound);
  void abandon_grants(std::uint64_t seq, Inbound& inbound);
  void part_complete(std::uint64_t seq, Inbound& inbound, InboundPart& part, Buffer bytes);
  bool turn_has_come(const Inbound& inbound) const;
  void complete(std::uint64_t seq, Inbound inbound);
  void deliver(std::uint64_t seq, Inbound inbound);

  Limits limits_;
  Allocator* allocator_;
  SequenceSet complete_;
  std::map<std::uint64_t, Inbound> inbounds_;           // incomplete, or waiting for their lane
  std::map<std::uint64_t, std::uint64_t> waiting_for_;  // lane_prev -> its successor
  struct Place {
    std::uint64_t seq;
    std::uint32_t part;
  };
  std::map<std::pair<wire::ConnectionId, std::uint64_t>, Place> grants_;  // connection, grant
  std::map<std::pair<wire::ConnectionId, std::uint64_t>, MutableBuffer> standing_;
  std::vector<std::uint64_t> placed_;
  std::vector<ToMap> to_map_;
  std::set<std::uint64_t> borrowed_;  // loans given to this side and not returned
  std::vector<std::uint64_t> unused_loans_;
  std::uint64_t small_held_ = 0;  // memory held by the messages in inbounds_
  std::uint64_t large_held_ = 0;
  std::vector<Inbound> ready_;
  std::uint32_t completed_ = 0;
};

}  // namespace moolink::session
