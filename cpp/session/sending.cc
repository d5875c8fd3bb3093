#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "session/session.h"

namespace moolink::session {

namespace {

// Chunks given to a connection between two calls of writable(), and grants requested at a time:
// enough to keep it busy, few enough that a small message gets through soon.
constexpr std::uint32_t kChunksQueued = 2;
constexpr std::uint32_t kGrantsAsked = 8;

std::uint64_t time_left_us(Time now, Time deadline) {
  if (deadline == kNever) return 0;
  const auto left = std::chrono::duration_cast<microseconds>(deadline - now).count();
  return left < 1 ? 1 : static_cast<std::uint64_t>(left);  // 0 would mean: no deadline
}

// The receiver reads a body itself: never from memory that this side could still write.
bool by_grant(const wire::PathTraits& traits, std::uint32_t part, std::uint64_t bytes) {
  return traits.grants && bytes >= traits.grant_bytes && part != wire::kBodyPart;
}

}  // namespace

bool Session::send(Time now, OutgoingMessage&& message) {
  check(message, config_.limits);
  if (!accepts(message.payload.bytes(), message.payload.parts.size(), message.held)) {
    was_full_ = true;
    return false;
  }
  const std::uint64_t seq = outbox_.push(std::move(message));
  if (Link* link = best_link(now)) write_message(now, *link, seq);
  return true;
}

// Every frame carries the acknowledgement; a separate ACK is needed only without traffic, or for
// numbers above a gap.
void Session::write(Link& link, wire::Frame frame) {
  frame.header.ack = inbox_.complete().cum();
  if (!inbox_.complete().has_gaps()) {
    acks_due_ = 0;
    ack_at_ = kNever;
  }
  actions_.push_back(Write{link.connection, std::move(frame)});
}

void Session::write_ack(Time now) {
  acks_due_ = 0;
  ack_at_ = kNever;
  Link* link = best_link(now);
  if (link == nullptr) return;  // the next greeting carries it
  wire::Ack ack{inbox_.complete().cum(), inbox_.complete().bitmap()};
  if (mutant("ack_one_too_many")) ++ack.cum;
  write(*link, wire::make_frame(wire::FrameType::ack, ack));
}

void Session::write_ping(Time now, Link& link) {
  ++link.pings;
  link.ping_times[link.pings % link.ping_times.size()] = now;
  link.pinged_at = now;
  link.ping_at = now + config_.timing.ping_after;
  write(link, wire::make_frame(wire::FrameType::ping, wire::Ping{link.pings}));
}

void Session::write_window(Link& link) {
  wire::Frame frame = wire::make_frame(wire::FrameType::window, receive_window_);
  frame.header.seq = window_number_;
  write(link, std::move(frame));
}

void Session::write_message(Time now, Link& link, std::uint64_t seq) {
  Outgoing& outgoing = *outbox_.find(seq);
  if (asks_to_lend(link, seq, outgoing)) return;
  const OutgoingMessage& message = outgoing.message;
  wire::MessageHead head;
  head.lane_prev = outgoing.lane_prev;
  head.kind = message.kind;
  head.ttl_us = time_left_us(now, message.deadline);
  if (mutant("ttl_forgotten_on_replay") && outgoing.attempt > 0) head.ttl_us = 0;
  head.attempt = outgoing.attempt;
  head.body.bytes = message.payload.body.size();
  head.parts.resize(message.payload.parts.size());
  for (std::size_t i = 0; i < head.parts.size(); ++i) {
    head.parts[i].bytes = message.payload.parts[i].size();
  }
  for (const LargePart& large : outgoing.large) {
    wire::PartHead& part = large.part == wire::kBodyPart ? head.body : head.parts[large.part];
    part.where = by_grant(link.traits, large.part, part.bytes) ? wire::PartWhere::grant
                                                               : wire::PartWhere::stream;
  }
  head.lent = message.payload.lent;
  for (std::size_t i = 0; i < head.lent.size(); ++i) {
    wire::PartHead& part = head.parts[head.lent[i].part];
    if (lend(link, outgoing, i, part)) {
      part.where = wire::PartWhere::loan;
      outgoing.find_large(head.lent[i].part)->state = LargePart::State::sent;
    }
  }
  place_parts(link, outgoing, head);
  std::vector<Buffer> payload;
  payload.reserve(1 + head.parts.size());
  const auto add = [&](const wire::PartHead& part, const Buffer& bytes) {
    if (part.where == wire::PartWhere::inline_ && !bytes.empty()) payload.push_back(bytes);
  };
  add(head.body, message.payload.body);
  for (std::size_t i = 0; i < head.parts.size(); ++i) {
    add(head.parts[i], message.payload.parts[i]);
  }
  wire::Frame frame = wire::make_frame(wire::FrameType::message, head, std::move(payload));
  frame.header.seq = seq;
  frame.header.lane = message.lane;
  outgoing.connection = link.connection;
  outgoing.written = true;
  if (!outgoing.large.empty()) plan_parts(outgoing, head);
  write(link, std::move(frame));
  if (!outgoing.large.empty()) {
    take_turn(link, seq, outgoing);
    write_parts(link);
  }
}

// In the order of the parts: by grant or as chunks, except those that are already lent or placed.
void Session::plan_parts(Outgoing& outgoing, const wire::MessageHead& head) {
  outgoing.unsent = std::make_unique<Unsent>();
  for (LargePart& large : outgoing.large) {
    if (large.state != LargePart::State::waiting) continue;
    const bool streams =
        large.part == wire::kBodyPart || head.parts[large.part].where == wire::PartWhere::stream;
    if (streams) {
      outgoing.stream(large);
    } else {
      outgoing.unsent->to_ask.push_back(static_cast<std::size_t>(&large - outgoing.large.data()));
    }
  }
}

// Messages with large parts take turns, one chunk (or request for a grant) each.
void Session::take_turn(Link& link, std::uint64_t seq, Outgoing& outgoing) {
  if (std::exchange(outgoing.has_turn, true)) return;
  link.turns.push_back(seq);
}

void Session::write_parts(Link& link) {
  std::size_t idle = 0;  // turns in a row in which nothing could be written
  while (idle < link.turns.size()) {
    const std::uint64_t seq = link.turns.front();
    link.turns.pop_front();
    Outgoing* outgoing = outbox_.find(seq);
    if (outgoing == nullptr || outgoing->connection != link.connection) continue;
    outgoing->has_turn = false;
    idle = write_part(link, seq, *outgoing) ? 0 : idle + 1;
    if (!outgoing->unsent->empty()) take_turn(link, seq, *outgoing);
  }
}

// Writes a chunk of the first part that may be written now, or asks for its grant. False: none may.
bool Session::write_part(Link& link, std::uint64_t seq, Outgoing& outgoing) {
  const Unsent& unsent = *outgoing.unsent;
  const bool may_ask = unsent.has_to_ask() && link.grants_asked < kGrantsAsked;
  const bool may_stream = !unsent.to_stream.empty() && link.chunks_queued < kChunksQueued;
  if (!may_ask && !may_stream) return false;
  if (may_ask && (!may_stream || unsent.to_ask[unsent.next_to_ask] < unsent.to_stream.top())) {
    ask_for_grant(link, seq, outgoing);
  } else {
    write_chunk(link, seq, outgoing);
  }
  return true;
}

void Session::ask_for_grant(Link& link, std::uint64_t seq, Outgoing& outgoing) {
  Unsent& unsent = *outgoing.unsent;
  LargePart& part = outgoing.large[unsent.to_ask[unsent.next_to_ask++]];
  part.state = LargePart::State::asked;
  ++link.grants_asked;
  const std::size_t size = outgoing.bytes_of(part.part).size();
  write(link, wire::make_frame(wire::FrameType::want, wire::Want{seq, part.part, size}));
}

void Session::write_chunk(Link& link, std::uint64_t seq, Outgoing& outgoing) {
  LargePart& part = outgoing.large[outgoing.unsent->to_stream.top()];
  const Buffer& bytes = outgoing.bytes_of(part.part);
  const std::size_t offset = static_cast<std::size_t>(part.offset);
  const std::size_t size = std::min(link.chunk_bytes, bytes.size() - offset);
  const wire::ChunkHead head{seq, part.part, outgoing.attempt, offset, size};
  part.offset += size;
  if (part.offset == bytes.size()) {
    part.state = LargePart::State::sent;
    outgoing.unsent->to_stream.pop();
  }
  ++link.chunks_queued;
  write(link, wire::make_frame(wire::FrameType::chunk, head, {bytes.slice(offset, size)}));
}

}  // namespace moolink::session
