#include "session/sender.h"

#include <algorithm>
#include <memory>

namespace moolink::session {

namespace {

std::uint64_t time_left_us(Time now, Time deadline) {
  if (deadline == kNever) return 0;
  const auto left = std::chrono::duration_cast<microseconds>(deadline - now).count();
  return left < 1 ? 1 : static_cast<std::uint64_t>(left);  // 0 would mean: no deadline
}

// The receiver reads a body itself: never from memory that this side could still write.
bool by_rendezvous(const wire::PathTraits& traits, std::uint32_t part, std::uint64_t bytes) {
  return traits.grants && bytes >= traits.grant_bytes && part != wire::kBodyPart;
}

// Parts placed in pre-posted buffers of this connection have arrived already.
void name_placed(ConnectionId connection, Outgoing& outgoing, wire::MessageHead& head) {
  for (const wire::PlacedPart& placed : outgoing.message.payload.placed) {
    wire::StandingGrant& buffer = *placed.standing;
    LargePart* large = outgoing.find_large(placed.part);
    const bool here = !buffer.named && buffer.connection == connection;
    if (large == nullptr || !here) continue;
    buffer.named = true;
    head.parts[placed.part].where = wire::PartWhere::placed;
    head.parts[placed.part].id = buffer.grant;
    large->state = LargePart::State::sent;
  }
}

std::vector<Buffer> inline_bytes(const wire::MessageHead& head, const wire::Payload& payload) {
  std::vector<Buffer> bytes;
  bytes.reserve(1 + head.parts.size());
  const auto add = [&](const wire::PartHead& part, const Buffer& of_part) {
    if (part.where == wire::PartWhere::inline_ && !of_part.empty()) bytes.push_back(of_part);
  };
  add(head.body, payload.body);
  for (std::size_t i = 0; i < head.parts.size(); ++i) add(head.parts[i], payload.parts[i]);
  return bytes;
}

// In the order of the parts: by rendezvous or as chunks, except those that are lent or placed.
void plan_large_parts(Outgoing& outgoing, const wire::MessageHead& head) {
  outgoing.unsent = std::make_unique<Unsent>();
  for (LargePart& large : outgoing.large) {
    if (large.state != LargePart::State::waiting) continue;
    const bool streams =
        large.part == wire::kBodyPart || head.parts[large.part].where == wire::PartWhere::stream;
    if (streams) {
      outgoing.stream(large);
    } else {
      outgoing.unsent->to_request.push_back(
          static_cast<std::size_t>(&large - outgoing.large.data()));
    }
  }
}

}  // namespace

void Sender::send(Time now, const Link* link, OutgoingMessage&& message) {
  const std::uint64_t seq = outbox_.push(std::move(message));
  if (link != nullptr) write(now, *link, seq);
}

void Sender::write_waiting(Time now, const Link& link) {
  for (std::uint64_t seq = outbox_.first(); seq <= outbox_.last(); ++seq) {
    const Outgoing* outgoing = outbox_.find(seq);
    if (outgoing != nullptr && outgoing->connection == 0) write(now, link, seq);
  }
}

void Sender::write(Time now, const Link& link, std::uint64_t seq) {
  Outgoing& outgoing = *outbox_.find(seq);
  if (loans_.ask(link.connection, link.traits, seq, outgoing)) return;
  const wire::MessageHead head = head_of(now, link, outgoing);
  wire::Frame frame = wire::make_frame(wire::FrameType::message, head,
                                       inline_bytes(head, outgoing.message.payload));
  frame.header.seq = seq;
  frame.header.lane = outgoing.message.lane;
  outgoing.connection = link.connection;
  outgoing.written = true;
  if (!outgoing.large.empty()) plan_large_parts(outgoing, head);
  sink_.write(link.connection, std::move(frame));
  if (!outgoing.large.empty()) writers_.at(link.connection).add(seq, outgoing);
}

wire::MessageHead Sender::head_of(Time now, const Link& link, Outgoing& outgoing) {
  const OutgoingMessage& message = outgoing.message;
  wire::MessageHead head;
  head.lane_prev = outgoing.lane_prev;
  head.kind = message.kind;
  head.ttl_us = time_left_us(now, message.deadline);
  head.attempt = outgoing.attempt;
  head.body.bytes = message.payload.body.size();
  head.parts.resize(message.payload.parts.size());
  for (std::size_t i = 0; i < head.parts.size(); ++i) {
    head.parts[i].bytes = message.payload.parts[i].size();
  }
  for (const LargePart& large : outgoing.large) {
    wire::PartHead& part = large.part == wire::kBodyPart ? head.body : head.parts[large.part];
    part.where = by_rendezvous(link.traits, large.part, part.bytes) ? wire::PartWhere::grant
                                                                    : wire::PartWhere::stream;
  }
  head.lent = message.payload.lent;
  for (std::size_t i = 0; i < head.lent.size(); ++i) {
    wire::PartHead& part = head.parts[head.lent[i].part];
    if (loans_.lend(link.traits, outgoing, i, part)) {
      part.where = wire::PartWhere::loan;
      outgoing.find_large(head.lent[i].part)->state = LargePart::State::sent;
    }
  }
  name_placed(link.connection, outgoing, head);
  return head;
}

std::vector<LostMessage> Sender::clear() {
  std::vector<LostMessage> lost;
  for (const Outgoing& outgoing : outbox_.clear()) {
    lost.push_back({outgoing.message.cookie, outgoing.written ? Ran::maybe : Ran::no});
  }
  writers_.clear();
  was_full_ = false;
  return lost;
}

PartWriter* Sender::parts_of(ConnectionId connection) {
  const auto found = writers_.find(connection);
  return found == writers_.end() ? nullptr : &found->second;
}

void Sender::segments_passed(Time now, const Link& link, std::uint64_t seq, bool passed) {
  Outgoing* outgoing = outbox_.find(seq);
  if (outgoing == nullptr || outgoing->connection != link.connection ||
      outgoing->lending != Outgoing::Lending::asked) {
    return;  // the connection was lost meanwhile
  }
  outgoing->lending = passed ? Outgoing::Lending::possible : Outgoing::Lending::impossible;
  write(now, link, seq);
}

void Sender::acknowledged(std::uint64_t cum, std::span<const std::uint64_t> bitmap) {
  if (cum < outbox_.first() && bitmap.empty()) return;
  const bool plausible =
      outbox_.acknowledge(cum, bitmap, [this](std::uint64_t cookie) { sink_.add(Acked{cookie}); });
  if (!plausible) wire::fail("a message was acknowledged that was never sent");
  window_changed();
}

void Sender::set_peer_window(const wire::Window& window, std::uint64_t number) {
  outbox_.set_peer_window(window, number);
  window_changed();
}

void Sender::window_changed() {
  if (std::exchange(was_full_, false)) sink_.add(WindowOpened{});
}

}  // namespace moolink::session
