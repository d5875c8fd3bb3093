#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/time.h"
#include "session/actions.h"
#include "session/feedback.h"
#include "session/loans.h"
#include "session/preposted.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::session {

// Where the bytes of an incoming body or part come from: its message's frame, chunks, memory that
// the sender will request, has requested, or was granted, the sender's lent memory, or a pre-posted
// buffer.
enum class Transfer : std::uint8_t {
  in_frame,
  chunks,
  rendezvous,
  requested,
  granted,
  lent,
  preposted,
};

// An incoming body or part.
class InboundPart {
 public:
  Transfer transfer() const { return transfer_; }
  // Whether the table of transitions (inbox.cc) allows it.
  bool may_become(Transfer next) const;
  void become(Transfer next);
  // Whether its sender may still write its memory.
  bool is_exposed() const {
    return transfer_ == Transfer::granted || transfer_ == Transfer::preposted ||
           transfer_ == Transfer::lent;
  }

  bool complete = false;
  std::uint64_t size = 0;
  std::uint64_t announced = 0;  // bytes of its chunks; these are announced in order
  std::uint64_t received = 0;   // ... and end in any order
  std::uint64_t loan = 0;       // its number as a loan, in this attempt or an earlier one
  MutableBuffer memory;         // where chunks or the grant's filler write; empty: discarded
  Buffer bytes;                 // when complete

 private:
  Transfer transfer_ = Transfer::in_frame;
};

struct Inbound {
  std::uint16_t lane = 0;
  std::uint8_t kind = 0;
  std::uint64_t lane_prev = 0;
  Time deadline = kNever;
  std::uint32_t attempt = 0;
  ConnectionId connection = 0;  // of that attempt
  std::size_t missing = 0;      // parts, the body among them
  std::uint64_t reserved = 0;   // memory reserved for it
  bool large = false;           // by its bytes
  Error error;                  // no memory: parts are discarded
  InboundPart body;
  std::vector<InboundPart> parts;
  std::vector<wire::LentPart> lent;

  InboundPart* find(std::uint32_t part) {
    if (part == wire::kBodyPart) return &body;
    return part < parts.size() ? &parts[part] : nullptr;
  }
};

// The message as its user gets it; takes the parts.
Deliver delivery_of(Inbound& inbound);

// Messages received that were not delivered yet: partial ones, and complete ones that wait for
// their lane. Everything the peer sends is checked; a violation of the protocol throws
// Exception{wire}.
//
// Owned by the Session, which passes on what the peer sends, carries out what is to be mapped, and
// delivers what is ready. Notes complete messages in the Acknowledgements, takes the pre-posted
// buffers that messages name, and tells LoansHeld of the loans. clear() drops everything with the
// session.
class Inbox {
 public:
  Inbox(const Limits& limits, Allocator& allocator, Acknowledgements& acknowledgements,
        PrepostedBuffers& preposted, LoansHeld& loans)
      : limits_(limits),
        allocator_(allocator),
        acknowledgements_(acknowledgements),
        preposted_(preposted),
        loans_(loans) {}

  // The latest attempt of a message that is not complete, or waits for its lane.
  std::optional<std::uint32_t> attempt_of(std::uint64_t seq) const;
  // The connections that may still write an older attempt into the message's memory, when a later
  // one has come over `over`: by chunks that are not complete, or by the sender into a grant.
  std::set<ConnectionId> writers(std::uint64_t seq, ConnectionId over) const;

  // A message frame: new, or a later attempt of an incomplete message. The caller has dropped
  // complete messages, and attempts not later than the known one.
  void accept(std::uint64_t seq, std::uint16_t lane, const wire::MessageHead& head,
              const Buffer& payload, ConnectionId connection, Time deadline);
  // Memory for a chunk; empty: discard the bytes.
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head);
  // False: no part awaited it.
  bool chunk_received(ConnectionId connection, const wire::ChunkHead& head);

  // The sender asks for memory. False: it does not need it any more.
  bool requested(ConnectionId connection, const wire::Want& want);
  // The part's memory is a grant from now on, or, if none was available, chunks will come. False:
  // the part is not awaited any more, and the memory is released.
  bool granted(ConnectionId connection, std::uint64_t seq, std::uint32_t part, std::uint64_t grant,
               MutableBuffer memory);
  // The sender has filled the grant, and writes it no more. Returns the size of its part; 0: it was
  // a pre-posted buffer that the sender does not need.
  std::uint64_t filled(ConnectionId connection, std::uint64_t grant);

  // A part in the sender's memory.
  struct ToMap {
    std::uint64_t seq;
    std::uint32_t part;
    wire::LoanPlace place;
  };
  // Those of the last message; mapped() answers each.
  std::vector<ToMap> take_to_map() { return std::exchange(to_map_, {}); }
  // The part's memory here, or why there is none.
  void mapped(ConnectionId connection, std::uint64_t seq, std::uint32_t part, Buffer bytes,
              const Error& error);
  // Complete messages whose turn in their lane has come; the caller delivers and clears them.
  std::vector<Inbound>& ready() { return ready_; }
  // How many messages have become complete since the last call.
  std::uint32_t take_completed() { return std::exchange(completed_, 0); }

  // Chunks and grants of the connection that are not complete are abandoned with it.
  void disconnected(ConnectionId connection);
  void clear();

 private:
  struct Place {
    std::uint64_t seq;
    std::uint32_t part;
  };

  Inbound* find(std::uint64_t seq);
  Inbound* find(std::uint64_t seq, ConnectionId connection);
  void read_parts(const wire::MessageHead& head, const Buffer& payload, Inbound& inbound);
  void reserve(std::uint64_t bytes, Inbound& inbound);
  // The counter of inbounds_'s messages of this one's size class.
  std::uint64_t& held(const Inbound& inbound);
  void take_preposted(const wire::PartHead& head, const Inbound& inbound, InboundPart& part);
  void place(const wire::PartHead& head, Inbound& inbound, InboundPart& part);
  void receive_chunks(Inbound& inbound, InboundPart& part);
  void borrow(const wire::MessageHead& head, std::uint64_t seq, Inbound& inbound);
  void abandon_grants(std::uint64_t seq, Inbound& inbound);
  void part_complete(std::uint64_t seq, Inbound& inbound, InboundPart& part, Buffer bytes);
  bool turn_has_come(const Inbound& inbound) const;
  void complete(std::uint64_t seq, Inbound inbound);
  void deliver(std::uint64_t seq, Inbound inbound);

  const Limits& limits_;
  Allocator& allocator_;
  Acknowledgements& acknowledgements_;
  PrepostedBuffers& preposted_;
  LoansHeld& loans_;
  std::map<std::uint64_t, Inbound> inbounds_;           // incomplete, or waiting for their lane
  std::map<std::uint64_t, std::uint64_t> waiting_for_;  // lane_prev -> its successor
  std::map<std::pair<ConnectionId, std::uint64_t>, Place> grants_;  // connection, grant
  // Announced chunks whose bytes are not complete: message, connection, part, offset.
  std::set<std::tuple<std::uint64_t, ConnectionId, std::uint32_t, std::uint64_t>> announced_;
  std::vector<ToMap> to_map_;
  std::uint64_t small_held_ = 0;  // memory held by the messages in inbounds_
  std::uint64_t large_held_ = 0;
  std::vector<Inbound> ready_;
  std::uint32_t completed_ = 0;
};

}  // namespace moolink::session
