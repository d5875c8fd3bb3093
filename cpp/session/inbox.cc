#include "session/inbox.h"

#include <algorithm>
#include <array>
#include <new>
#include <string>

#include "session/outbox.h"

namespace moolink::session {

namespace {

constexpr std::uint8_t bits(std::initializer_list<Transfer> states) {
  unsigned bits = 0;
  for (const Transfer state : states) bits |= 1U << static_cast<unsigned>(state);
  return static_cast<std::uint8_t>(bits);
}

// Where an attempt to send the message says that the part comes from.
constexpr std::uint8_t kAttempt = bits({Transfer::in_frame, Transfer::chunks, Transfer::rendezvous,
                                        Transfer::lent, Transfer::preposted});

// The transitions of a part that is not complete: from each state, by its number.
constexpr std::array<std::uint8_t, 7> kTransitions = {
    /* in_frame   */ kAttempt,
    /* chunks     */ kAttempt,
    /* rendezvous */ kAttempt | bits({Transfer::requested}),
    /* requested  */ kAttempt | bits({Transfer::granted}),  // or chunks: there is no memory
    /* granted    */ bits({Transfer::rendezvous}),          // the grant was abandoned
    /* lent       */ kAttempt,                              // or chunks: it could not be mapped
    /* preposted  */ 0,
};

bool in_frame(const wire::PartHead& head) {
  if (head.where == wire::PartWhere::inline_) return true;
  if (head.bytes == 0) wire::fail("an empty part outside its frame");
  return false;
}

// Whether the bytes will be in this side's memory, outside the frame.
bool is_sent(const wire::PartHead& head) {
  return !in_frame(head) && head.where != wire::PartWhere::loan;
}

}  // namespace

bool InboundPart::may_become(Transfer next) const {
  return !complete && (kTransitions[static_cast<std::size_t>(transfer_)] & bits({next})) != 0;
}

void InboundPart::become(Transfer next) {
  if (!may_become(next))
    throw Exception(ErrorCode::error, "a part changed its transfer out of order");
  transfer_ = next;
}

Deliver delivery_of(Inbound& inbound) {
  wire::Payload payload;
  payload.body = std::move(inbound.body.bytes);
  if (!inbound.error) {
    for (const wire::LentPart& lent : inbound.lent) {
      const bool copied = inbound.parts[lent.part].transfer() != Transfer::lent;
      if (copied && lent.captured()) continue;  // a part like any other
      // Only its lender can use its place.
      payload.lent.push_back({lent.part, 0, 0, copied});
    }
    payload.parts.reserve(inbound.parts.size());
    for (InboundPart& part : inbound.parts) {
      if (part.is_exposed()) {
        payload.exposed.push_back(static_cast<std::uint32_t>(payload.parts.size()));
      }
      payload.parts.push_back(std::move(part.bytes));
    }
  }
  return {inbound.lane, inbound.kind, inbound.deadline, std::move(payload),
          std::move(inbound.error)};
}

std::optional<std::uint32_t> Inbox::attempt_of(std::uint64_t seq) const {
  const auto found = inbounds_.find(seq);
  return found == inbounds_.end() ? std::nullopt : std::optional(found->second.attempt);
}

Inbound* Inbox::find(std::uint64_t seq) {
  const auto found = inbounds_.find(seq);
  return found == inbounds_.end() ? nullptr : &found->second;
}

// The message, if its present attempt comes over this connection.
Inbound* Inbox::find(std::uint64_t seq, ConnectionId connection) {
  Inbound* inbound = find(seq);
  return inbound == nullptr || inbound->connection != connection ? nullptr : inbound;
}

std::set<ConnectionId> Inbox::writers(std::uint64_t seq, ConnectionId over) const {
  std::set<ConnectionId> writers;
  for (auto chunk = announced_.lower_bound({seq, 0, 0, 0});
       chunk != announced_.end() && std::get<0>(*chunk) == seq; ++chunk) {
    writers.insert(std::get<1>(*chunk));
  }
  if (writers.contains(over)) wire::fail("a later attempt before the earlier one's chunks");
  const Inbound& inbound = inbounds_.at(seq);
  const auto granted = [](const InboundPart& part) {
    return part.transfer() == Transfer::granted && !part.complete;
  };
  const bool by_grant = granted(inbound.body) || std::ranges::any_of(inbound.parts, granted);
  if (inbound.connection != over && by_grant) writers.insert(inbound.connection);
  return writers;
}

void Inbox::accept(std::uint64_t seq, std::uint16_t lane, const wire::MessageHead& head,
                   const Buffer& payload, ConnectionId connection, Time deadline) {
  if (seq == 0 || seq > acknowledgements_.complete().cum() + kMaxSpan)
    wire::fail("a message outside the window");
  if (head.lane_prev >= seq) wire::fail("a message before itself in its lane");
  Inbound inbound;
  if (auto known = inbounds_.extract(seq)) {
    inbound = std::move(known.mapped());
    if (inbound.parts.size() != head.parts.size() || inbound.lane_prev != head.lane_prev) {
      wire::fail("a message differs between its attempts");
    }
    held(inbound) -= inbound.reserved;
    abandon_grants(seq, inbound);
  }
  inbound.lane = lane;
  inbound.kind = head.kind;
  inbound.lane_prev = head.lane_prev;
  inbound.deadline = std::min(inbound.deadline, deadline);
  inbound.attempt = head.attempt;
  inbound.connection = connection;
  read_parts(head, payload, inbound);
  borrow(head, seq, inbound);
  if (inbound.missing == 0) {
    complete(seq, std::move(inbound));
    return;
  }
  held(inbound) += inbound.reserved;
  inbounds_.emplace(seq, std::move(inbound));
}

void Inbox::read_parts(const wire::MessageHead& head, const Buffer& payload, Inbound& inbound) {
  // This side itself reads a body: never from memory that its sender may still write.
  const bool is_private =
      head.body.where == wire::PartWhere::inline_ || head.body.where == wire::PartWhere::stream;
  if (head.body.id != 0 || !is_private) wire::fail("a body in memory that its sender may write");
  inbound.parts.resize(head.parts.size());
  std::uint64_t outside = is_sent(head.body) ? head.body.bytes : 0;
  for (const wire::PartHead& part : head.parts) outside += is_sent(part) ? part.bytes : 0;
  reserve(outside + payload.size(), inbound);

  std::size_t at = 0;
  inbound.missing = 0;
  const auto read = [&](const wire::PartHead& part_head, InboundPart& part) {
    if (part.size != 0 && part.size != part_head.bytes) wire::fail("a part changed its size");
    part.size = part_head.bytes;
    if (!in_frame(part_head)) {
      if (part_head.where == wire::PartWhere::placed) {
        take_preposted(part_head, inbound, part);
      } else if (!part.complete) {
        place(part_head, inbound, part);
      }
      inbound.missing += part.complete ? 0 : 1;
      return;
    }
    if (part_head.bytes > payload.size() - at) wire::fail("a message shorter than its parts");
    if (!part.complete) {
      part.become(Transfer::in_frame);
      part.complete = true;
      part.bytes = payload.slice(at, static_cast<std::size_t>(part_head.bytes));
    }
    at += static_cast<std::size_t>(part_head.bytes);
  };
  read(head.body, inbound.body);
  for (std::size_t i = 0; i < head.parts.size(); ++i) read(head.parts[i], inbound.parts[i]);
  if (at != payload.size()) wire::fail("a message longer than its parts");
}

// The memory that a peer can make this side hold is bounded by its windows, of small messages and
// of large ones, or is one message. A later attempt of a message reuses the first one's
// reservation.
void Inbox::reserve(std::uint64_t bytes, Inbound& inbound) {
  const bool is_new = inbound.reserved == 0;
  inbound.large = bytes > kInlineBytes;
  if (is_new && held(inbound) > 2 * limits_.send_window_bytes) {
    wire::fail("more bytes under way than the window allows");
  }
  inbound.reserved = bytes + inbound.parts.size() * wire::kPartCost;
}

std::uint64_t& Inbox::held(const Inbound& inbound) {
  return inbound.large ? large_held_ : small_held_;
}

void Inbox::place(const wire::PartHead& head, Inbound& inbound, InboundPart& part) {
  if (head.where == wire::PartWhere::stream) return receive_chunks(inbound, part);
  part.become(head.where == wire::PartWhere::loan ? Transfer::lent : Transfer::rendezvous);
  part.memory = {};
}

// From their beginning, into the memory of an earlier attempt if there is any.
void Inbox::receive_chunks(Inbound& inbound, InboundPart& part) {
  const bool has_memory = part.transfer() == Transfer::chunks && !part.memory.empty();
  part.become(Transfer::chunks);
  part.announced = part.received = 0;
  // A message delivered with an error still has its body.
  if (has_memory || (inbound.error && &part != &inbound.body)) return;
  try {
    part.memory = allocator_.allocate(static_cast<std::size_t>(part.size));
  } catch (const std::bad_alloc&) {
    part.memory = {};
    inbound.error.code = ErrorCode::error;
    inbound.error.message =
        "no memory for a part of " + std::to_string(part.size) + " bytes at the receiver";
  }
}

void Inbox::take_preposted(const wire::PartHead& head, const Inbound& inbound, InboundPart& part) {
  const MutableBuffer bytes = preposted_.take(inbound.connection, head.id, head.bytes);
  if (part.complete) return;
  part.become(Transfer::preposted);
  part.complete = true;
  part.memory = {};
  part.bytes = bytes;
}

// The parts in the sender's memory, with their loans: each is noted once over all attempts, so that
// it ends once.
void Inbox::borrow(const wire::MessageHead& head, std::uint64_t seq, Inbound& inbound) {
  inbound.lent = head.lent;
  std::size_t loans = 0;
  for (const wire::LentPart& lent : head.lent) {
    const wire::PartHead& part_head = head.parts[lent.part];
    InboundPart& part = inbound.parts[lent.part];
    if (part_head.where == wire::PartWhere::placed) wire::fail("a lent part in a grant");
    if (part_head.id == 0) continue;
    ++loans;
    if (part.loan == 0) {
      part.loan = part_head.id;
      loans_.add(part.loan);
    }
    if (part.loan != part_head.id) wire::fail("a part changed its loan");
    if (part_head.where == wire::PartWhere::loan && !part.complete) {
      to_map_.push_back({seq, lent.part, {part.loan, lent.segment, lent.offset, part.size}});
    }
  }
  for (const wire::PartHead& part : head.parts) {
    if (part.where == wire::PartWhere::loan && part.id == 0) wire::fail("a loan without a number");
    const bool loan = part.id != 0 && part.where != wire::PartWhere::placed;
    if (loan && loans-- == 0) wire::fail("a loan of a part that is not lent");
  }
}

void Inbox::mapped(ConnectionId connection, std::uint64_t seq, std::uint32_t part_number,
                   Buffer bytes, const Error& error) {
  Inbound* inbound = find(seq, connection);
  if (inbound == nullptr) return;
  InboundPart* part = inbound->find(part_number);
  if (part == nullptr || part->complete || part->transfer() != Transfer::lent) return;
  if (error) {
    inbound->error = error;
    part->become(Transfer::chunks);  // nothing refers to the loan
  }
  part_complete(seq, *inbound, *part, std::move(bytes));
}

std::span<std::byte> Inbox::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  Inbound* inbound = find(head.seq);
  if (inbound == nullptr) return {};  // complete: a late attempt
  const bool current = inbound->connection == connection && inbound->attempt == head.attempt;
  if (!current) return {};
  InboundPart* part = inbound->find(head.part);
  if (part == nullptr) wire::fail("a chunk of a part that its message does not have");
  if (part->complete) return {};
  if (part->transfer() != Transfer::chunks) wire::fail("a chunk of a part that is not streamed");
  if (head.offset != part->announced) wire::fail("a chunk out of order");
  if (head.bytes == 0 || head.offset > part->size || head.bytes > part->size - head.offset) {
    wire::fail("a chunk beyond its part");
  }
  part->announced += head.bytes;
  announced_.emplace(head.seq, connection, head.part, head.offset);
  if (part->memory.empty()) return {};
  return part->memory.span().subspan(static_cast<std::size_t>(head.offset),
                                     static_cast<std::size_t>(head.bytes));
}

bool Inbox::chunk_received(ConnectionId connection, const wire::ChunkHead& head) {
  if (announced_.erase({head.seq, connection, head.part, head.offset}) == 0) return false;
  Inbound* inbound = find(head.seq);
  if (inbound == nullptr) return true;
  const bool current = inbound->connection == connection && inbound->attempt == head.attempt;
  if (!current) return true;
  InboundPart* part = inbound->find(head.part);
  if (part == nullptr || part->complete) return true;
  part->received += head.bytes;
  if (part->received == part->size) part_complete(head.seq, *inbound, *part, part->memory);
  return true;
}

bool Inbox::requested(ConnectionId connection, const wire::Want& want) {
  Inbound* inbound = find(want.seq, connection);
  if (inbound == nullptr) return false;
  InboundPart* part = inbound->find(want.part);
  if (part != nullptr && part->complete) return false;
  if (part == nullptr || part->size != want.bytes || !part->may_become(Transfer::requested)) {
    wire::fail("a grant was asked for that no message needs");
  }
  part->become(Transfer::requested);
  return true;
}

bool Inbox::granted(ConnectionId connection, std::uint64_t seq, std::uint32_t part_number,
                    std::uint64_t grant, MutableBuffer memory) {
  Inbound* inbound = find(seq, connection);
  if (inbound == nullptr) return false;
  InboundPart* part = inbound->find(part_number);
  if (part == nullptr || !part->may_become(Transfer::granted)) return false;
  if (memory.empty()) {
    receive_chunks(*inbound, *part);
    return true;
  }
  part->become(Transfer::granted);
  part->memory = std::move(memory);
  grants_[{connection, grant}] = {seq, part_number};
  return true;
}

std::uint64_t Inbox::filled(ConnectionId connection, std::uint64_t grant) {
  const auto found = grants_.find({connection, grant});
  if (found == grants_.end()) {
    if (preposted_.release(connection, grant)) return 0;
    wire::fail("DONE for a grant that was not given");
  }
  const Place place = found->second;
  grants_.erase(found);
  Inbound* inbound = find(place.seq);
  if (inbound == nullptr) return 0;
  InboundPart* part = inbound->find(place.part);
  const std::uint64_t size = part->size;
  part_complete(place.seq, *inbound, *part, part->memory);
  return size;
}

// Releases the memory: the path does not reuse it while the sender may write into it.
void Inbox::abandon_grants(std::uint64_t seq, Inbound& inbound) {
  std::erase_if(grants_, [&](const auto& entry) { return entry.second.seq == seq; });
  const auto abandon = [](InboundPart& part) {
    if (part.complete || part.transfer() != Transfer::granted) return;
    part.become(Transfer::rendezvous);
    part.memory = {};
  };
  abandon(inbound.body);
  for (InboundPart& part : inbound.parts) abandon(part);
}

void Inbox::part_complete(std::uint64_t seq, Inbound& inbound, InboundPart& part, Buffer bytes) {
  part.complete = true;
  part.bytes = std::move(bytes);
  part.memory = {};
  if (--inbound.missing != 0) return;
  auto node = inbounds_.extract(seq);
  held(node.mapped()) -= node.mapped().reserved;
  complete(seq, std::move(node.mapped()));
}

// A complete message that is still kept waits for its lane; so do its successors there.
bool Inbox::turn_has_come(const Inbound& inbound) const {
  if (inbound.lane_prev == 0) return true;
  return acknowledgements_.complete().contains(inbound.lane_prev) &&
         !inbounds_.contains(inbound.lane_prev);
}

void Inbox::complete(std::uint64_t seq, Inbound inbound) {
  acknowledgements_.add(seq);
  ++completed_;
  for (const InboundPart& part : inbound.parts) {
    if (part.loan != 0 && part.transfer() != Transfer::lent) loans_.end(part.loan);
  }
  if (turn_has_come(inbound)) {
    deliver(seq, std::move(inbound));
    return;
  }
  if (!waiting_for_.emplace(inbound.lane_prev, seq).second) {
    wire::fail("two messages follow the same one in a lane");
  }
  held(inbound) += inbound.reserved;
  inbounds_.emplace(seq, std::move(inbound));
}

void Inbox::deliver(std::uint64_t seq, Inbound inbound) {
  ready_.push_back(std::move(inbound));
  while (!waiting_for_.empty()) {
    const auto waiting = waiting_for_.find(seq);
    if (waiting == waiting_for_.end()) return;
    seq = waiting->second;
    waiting_for_.erase(waiting);
    auto node = inbounds_.extract(seq);
    held(node.mapped()) -= node.mapped().reserved;
    ready_.push_back(std::move(node.mapped()));
  }
}

void Inbox::disconnected(ConnectionId connection) {
  std::erase_if(announced_,
                [connection](const auto& chunk) { return std::get<1>(chunk) == connection; });
  for (auto& [seq, inbound] : inbounds_) {
    if (inbound.connection == connection && inbound.missing != 0) abandon_grants(seq, inbound);
  }
}

void Inbox::clear() {
  inbounds_.clear();
  waiting_for_.clear();
  grants_.clear();
  announced_.clear();
  to_map_.clear();
  small_held_ = large_held_ = 0;
  ready_.clear();
  completed_ = 0;
}

}  // namespace moolink::session
