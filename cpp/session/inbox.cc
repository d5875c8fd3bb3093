#include "session/inbox.h"

#include <algorithm>
#include <new>
#include <string>

#include "base/mutant.h"
#include "session/link.h"
#include "session/outbox.h"

namespace moolink::session {

namespace {

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

Inbound* Inbox::find(std::uint64_t seq) {
  const auto found = inbounds_.find(seq);
  return found == inbounds_.end() ? nullptr : &found->second;
}

void Inbox::accept(std::uint64_t seq, std::uint16_t lane, const wire::MessageHead& head,
                   const Buffer& payload, wire::ConnectionId connection, Time deadline) {
  if (seq == 0 || seq > complete_.cum() + kMaxSpan) wire::fail("a message outside the window");
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
  if (mutant("ack_before_complete")) complete_.insert(seq);
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
        take_standing(part_head, inbound, part);
      } else if (!part.complete) {
        place(part_head, inbound, part);
      }
      inbound.missing += part.complete ? 0 : 1;
      return;
    }
    if (part_head.bytes > payload.size() - at) wire::fail("a message shorter than its parts");
    part.bytes = payload.slice(at, static_cast<std::size_t>(part_head.bytes));
    part.complete = true;
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
  part.announced = part.received = 0;
  if (head.where == wire::PartWhere::loan) {
    part.how = InboundPart::How::lent;
    part.memory = {};
    return;
  }
  if (head.where == wire::PartWhere::grant) {
    part.how = InboundPart::How::to_be_granted;
    part.memory = {};
    return;
  }
  const bool has_memory = part.how == InboundPart::How::stream && !part.memory.empty();
  part.how = InboundPart::How::stream;
  // A message delivered with an error still has its body.
  if (has_memory || (inbound.error && &part != &inbound.body)) return;
  try {
    part.memory = allocator_->allocate(static_cast<std::size_t>(head.bytes));
  } catch (const std::bad_alloc&) {
    part.memory = {};
    inbound.error.code = ErrorCode::error;
    inbound.error.message =
        "no memory for a part of " + std::to_string(head.bytes) + " bytes at the receiver";
  }
}

void Inbox::take_standing(const wire::PartHead& head, const Inbound& inbound, InboundPart& part) {
  auto node = standing_.extract({inbound.connection, head.id});
  if (node.empty()) wire::fail("a part was placed in a grant that does not stand");
  const MutableBuffer& memory = node.mapped();
  if (head.bytes > memory.size() || head.bytes < memory.size() / kRoomiestGrant) {
    wire::fail("a part that does not fit the grant that it was placed in");
  }
  if (part.complete) return;
  part.how = InboundPart::How::placed;
  part.complete = true;
  part.memory = {};
  part.bytes = memory.slice(0, static_cast<std::size_t>(head.bytes));
  placed_.push_back(head.bytes);
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
      if (!borrowed_.insert(part.loan).second) wire::fail("a loan was given twice");
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

void Inbox::mapped(wire::ConnectionId connection, std::uint64_t seq, std::uint32_t part_number,
                   Buffer bytes, const Error& error) {
  Inbound* inbound = find(seq);
  if (inbound == nullptr || inbound->connection != connection) return;
  InboundPart* part = inbound->find(part_number);
  if (part == nullptr || part->complete || part->how != InboundPart::How::lent) return;
  if (error) {
    inbound->error = error;
    part->how = InboundPart::How::stream;  // nothing refers to the loan
  }
  part_complete(seq, *inbound, *part, std::move(bytes));
}

std::optional<std::span<std::byte>> Inbox::chunk_target(wire::ConnectionId connection,
                                                        const wire::ChunkHead& head) {
  Inbound* inbound = find(head.seq);
  if (inbound == nullptr) return std::nullopt;  // complete: a late attempt
  const bool current = inbound->connection == connection && inbound->attempt == head.attempt;
  const bool any = mutant("accept_old_attempt");
  if (!current && !any) return std::nullopt;
  InboundPart* part = inbound->find(head.part);
  if (part == nullptr) wire::fail("a chunk of a part that its message does not have");
  if (part->complete) return std::nullopt;
  if (part->how != InboundPart::How::stream) wire::fail("a chunk of a part that is not streamed");
  if (head.offset != part->announced && !any) wire::fail("a chunk out of order");
  if (head.bytes == 0 || head.offset > part->size || head.bytes > part->size - head.offset) {
    wire::fail("a chunk beyond its part");
  }
  part->announced += head.bytes;
  if (part->memory.empty()) return std::span<std::byte>();
  return part->memory.span().subspan(static_cast<std::size_t>(head.offset),
                                     static_cast<std::size_t>(head.bytes));
}

void Inbox::chunk_received(wire::ConnectionId connection, const wire::ChunkHead& head) {
  Inbound* inbound = find(head.seq);
  if (inbound == nullptr) return;
  const bool current = inbound->connection == connection && inbound->attempt == head.attempt;
  if (!current && !mutant("accept_old_attempt")) return;
  InboundPart* part = inbound->find(head.part);
  if (part == nullptr || part->complete) return;
  part->received += head.bytes;
  const bool early = mutant("complete_when_announced") && part->announced == part->size;
  if (part->received == part->size || early) {
    part_complete(head.seq, *inbound, *part, part->memory);
  }
}

bool Inbox::wanted(wire::ConnectionId connection, const wire::Want& want) {
  Inbound* inbound = find(want.seq);
  if (inbound == nullptr || inbound->connection != connection) return false;
  InboundPart* part = inbound->find(want.part);
  if (part == nullptr || part->how != InboundPart::How::to_be_granted || part->size != want.bytes) {
    if (part != nullptr && part->complete) return false;
    wire::fail("a grant was asked for that no message needs");
  }
  part->how = InboundPart::How::asked;
  return true;
}

bool Inbox::granted(wire::ConnectionId connection, std::uint64_t seq, std::uint32_t part_number,
                    std::uint64_t grant, MutableBuffer memory) {
  Inbound* inbound = find(seq);
  if (inbound == nullptr || inbound->connection != connection) return false;
  InboundPart* part = inbound->find(part_number);
  if (part == nullptr || part->how != InboundPart::How::asked) return false;
  if (memory.empty()) {
    wire::PartHead head;
    head.bytes = part->size;
    head.where = wire::PartWhere::stream;
    place(head, *inbound, *part);
    return true;
  }
  part->how = InboundPart::How::granted;
  part->grant = grant;
  part->memory = std::move(memory);
  grants_[{connection, grant}] = {seq, part_number};
  return true;
}

std::uint64_t Inbox::filled(wire::ConnectionId connection, std::uint64_t grant) {
  const auto found = grants_.find({connection, grant});
  if (found == grants_.end()) {
    if (standing_.erase({connection, grant}) == 1) return 0;
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

void Inbox::stand(wire::ConnectionId connection, std::uint64_t grant, MutableBuffer memory) {
  standing_.emplace(std::pair(connection, grant), std::move(memory));
}

Inbox::Standing Inbox::standing(wire::ConnectionId connection) const {
  Standing standing;
  for (auto at = standing_.lower_bound({connection, 0});
       at != standing_.end() && at->first.first == connection; ++at) {
    ++standing.grants;
    standing.bytes += at->second.size();
  }
  return standing;
}

bool Inbox::has_open_grants(const Inbound& inbound) const {
  const auto open = [](const InboundPart& part) {
    return part.how == InboundPart::How::granted && !part.complete;
  };
  return open(inbound.body) || std::ranges::any_of(inbound.parts, open);
}

// Releases the memory: the path does not reuse it while the sender may write into it.
void Inbox::abandon_grants(std::uint64_t seq, Inbound& inbound) {
  std::erase_if(grants_, [&](const auto& entry) { return entry.second.seq == seq; });
  const auto abandon = [](InboundPart& part) {
    if (part.complete || part.how != InboundPart::How::granted) return;
    part.how = InboundPart::How::to_be_granted;
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
  if (inbound.lane_prev == 0 || mutant("ignore_lane_order")) return true;
  return complete_.contains(inbound.lane_prev) && !inbounds_.contains(inbound.lane_prev);
}

void Inbox::complete(std::uint64_t seq, Inbound inbound) {
  complete_.insert(seq);
  ++completed_;
  for (const InboundPart& part : inbound.parts) {
    const bool held = part.how == InboundPart::How::lent;
    const bool ends = held ? mutant("return_what_is_held") : !mutant("keep_unused_loans");
    if (part.loan != 0 && ends) unused_loans_.push_back(part.loan);
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

void Inbox::disconnected(wire::ConnectionId connection) {
  std::erase_if(standing_,
                [connection](const auto& entry) { return entry.first.first == connection; });
  for (auto& [seq, inbound] : inbounds_) {
    if (inbound.connection == connection && inbound.missing != 0) abandon_grants(seq, inbound);
  }
}

void Inbox::clear() {
  complete_ = {};
  inbounds_.clear();
  waiting_for_.clear();
  grants_.clear();
  standing_.clear();
  placed_.clear();
  to_map_.clear();
  borrowed_.clear();
  unused_loans_.clear();
  small_held_ = large_held_ = 0;
  ready_.clear();
  completed_ = 0;
}

}  // namespace moolink::session
