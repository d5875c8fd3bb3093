#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "session/session.h"

namespace moolink::session {

namespace {

constexpr std::uint64_t kLongestTtl = 10ULL * 365 * 24 * 3600 * 1000 * 1000;  // µs: ten years

Time deadline_of(Time now, std::uint64_t ttl_us) {
  if (ttl_us == 0) return kNever;
  return now + microseconds(std::min(ttl_us, kLongestTtl));
}

}  // namespace

template <class Work>
void Session::checked(Work&& work) {
  try {
    work();
  } catch (const Exception& broken) {
    lose(broken.error(), 0);
  }
}

void Session::received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame) {
  Link* link = find(connection);
  if (link == nullptr) return;  // closed by this side
  checked([&] { dispatch(now, *link, frame); });
}

std::span<std::byte> Session::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  std::span<std::byte> bytes;
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return bytes;
  checked([&] {
    const auto target = inbox_.chunk_target(connection, head);
    if (!target) return;
    link->receiving.emplace(head.seq, head.part, head.offset);
    bytes = *target;
  });
  return bytes;
}

void Session::chunk_received(Time now, ConnectionId connection, const wire::ChunkHead& head) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return;
  link->last_heard = now;
  last_heard_ = now;
  if (link->receiving.erase({head.seq, head.part, head.offset}) == 0) return;  // it was discarded
  checked([&] {
    inbox_.chunk_received(connection, head);
    deliver_ready(now);
  });
}

void Session::loan_mapped(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                          Buffer bytes, const Error& error) {
  if (find(connection) == nullptr) return;
  if (error.code == ErrorCode::wire) return lose(error, 0);
  checked([&] {
    inbox_.mapped(connection, seq, part, std::move(bytes), error);
    deliver_ready(now);
  });
}

void Session::dispatch(Time now, Link& link, const wire::ReceivedFrame& frame) {
  link.last_heard = now;
  if (frame.header.type == wire::FrameType::welcome) {
    welcomed(now, link, frame);
    return;
  }
  if (!link.attached) wire::fail("a message before the greeting was done");
  last_heard_ = now;
  acknowledged(frame.header.ack, {});
  switch (frame.header.type) {
    case wire::FrameType::message:
      received_message(now, link, frame);
      break;
    case wire::FrameType::want: {
      const auto want = wire::decode_control<wire::Want>(frame);
      if (inbox_.wanted(link.connection, want)) {
        actions_.push_back(AllocateGrant{link.connection, want.seq, want.part, want.bytes});
      }
      break;
    }
    case wire::FrameType::grant:
      received_grant(now, link, wire::decode_control<wire::Grant>(frame));
      break;
    case wire::FrameType::done:
      offer_standing(link,
                     inbox_.filled(link.connection, wire::decode_control<wire::Done>(frame).grant));
      deliver_ready(now);
      break;
    case wire::FrameType::ack: {
      const auto ack = wire::decode_control<wire::Ack>(frame);
      acknowledged(ack.cum, ack.bitmap);
      break;
    }
    case wire::FrameType::ping: {
      const auto ping = wire::decode_control<wire::Ping>(frame);
      write(link, wire::make_frame(wire::FrameType::pong, ping));
      break;
    }
    case wire::FrameType::pong:
      received_pong(now, link, wire::decode_control<wire::Ping>(frame).number);
      break;
    case wire::FrameType::window:
      outbox_.set_peer_window(wire::decode_control<wire::Window>(frame), frame.header.seq);
      if (std::exchange(was_full_, false)) actions_.push_back(WindowOpened{});
      break;
    default:
      wire::fail(std::string("an unexpected frame: ") + wire::kFrameTypes[frame.header.type]);
  }
  write_returns(now);
}

void Session::received_message(Time now, Link& link, const wire::ReceivedFrame& frame) {
  const std::uint64_t seq = frame.header.seq;
  if (seq == 0) wire::fail("a message without a number");
  const auto head = wire::decode_message_head(frame.control(), config_.limits);
  const ConnectionId connection = link.connection;
  const bool repeated = mutant("skip_duplicate_removal") ||
                        (mutant("deliver_twice_after_failover") && head.attempt > 1);
  if (inbox_.complete().contains(seq) && !repeated) {
    ack_due(now, 1);
  } else {
    const Inbound* known = inbox_.find(seq);
    if (known != nullptr && head.attempt <= known->attempt) return;
    if (known != nullptr) close_writers(now, seq, connection);
    inbox_.accept(seq, frame.header.lane, head, frame.payload(), connection,
                  deadline_of(now, head.ttl_us));
    map_loans(link);
    offer_standing_again(link);
    deliver_ready(now);
  }
}

void Session::ack_due(Time now, std::uint32_t messages) {
  if (messages == 0) return;
  if (acks_due_ == 0) ack_at_ = now + config_.timing.ack_after;
  acks_due_ += messages;
  if (acks_due_ >= config_.timing.ack_every) write_ack(now);
}

// Connections may still write an older attempt into the message's memory: by chunks that are not
// complete, or by the sender into a grant. They end before the new attempt starts.
void Session::close_writers(Time now, std::uint64_t seq, ConnectionId except) {
  const Inbound* inbound = inbox_.find(seq);
  std::vector<ConnectionId> writers;
  for (const auto& [connection, link] : links_) {
    const bool by_grant = connection == inbound->connection && inbox_.has_open_grants(*inbound);
    const auto chunk = link.receiving.lower_bound({seq, 0, 0});
    const bool by_chunk = chunk != link.receiving.end() && std::get<0>(*chunk) == seq;
    if (connection != except && (by_chunk || by_grant)) writers.push_back(connection);
    if (connection == except && by_chunk)
      wire::fail("a later attempt before the earlier one's chunks");
  }
  if (mutant("keep_old_writer")) return;
  for (const ConnectionId connection : writers) {
    close_link(now, connection, make_error(ErrorCode::closed, "the peer has left this path"));
  }
}

void Session::deliver_ready(Time now) {
  ack_due(now, inbox_.take_completed());
  give_back(now, inbox_.take_unused_loans());
  for (Inbound& inbound : inbox_.ready()) {
    if (inbound.kind == kReturnKind) {
      loans_returned(inbound.body.bytes);
      continue;
    }
    wire::Payload payload;
    payload.body = std::move(inbound.body.bytes);
    if (!inbound.error) {
      for (const wire::LentPart& lent : inbound.lent) {
        const bool copied = inbound.parts[lent.part].how != InboundPart::How::lent;
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
    actions_.push_back(Deliver{inbound.lane, inbound.kind, inbound.deadline, std::move(payload),
                               std::move(inbound.error)});
  }
  inbox_.ready().clear();
}

// Ignores answers so late that many PINGs have followed: they say little.
void Session::received_pong(Time now, Link& link, std::uint64_t number) {
  if (number == 0 || number > link.pings || number + link.ping_times.size() <= link.pings) return;
  const Duration sample = now - link.ping_times[number % link.ping_times.size()];
  const bool first = link.round_trip < Duration(0);
  link.round_trip = first ? sample : link.round_trip + (sample - link.round_trip) / 8;
  link.last_round_trip = sample;
}

void Session::received_grant(Time now, Link& link, const wire::Grant& grant) {
  if (grant.seq == 0) return received_standing(now, link, grant);
  Outgoing* outgoing = outbox_.find(grant.seq);
  LargePart* part = outgoing == nullptr || outgoing->connection != link.connection
                        ? nullptr
                        : outgoing->find_large(grant.part);
  if (part == nullptr || part->state != LargePart::State::asked) {
    wire::fail("a grant that was not asked for");
  }
  if (grant.grant == 0) {  // no memory of that kind: send chunks
    --link.grants_asked;
    outgoing->stream(*part);
    take_turn(link, grant.seq, *outgoing);
    write_parts(link);
    return;
  }
  const Buffer& bytes = outgoing->bytes_of(grant.part);
  if (grant.bytes < bytes.size()) wire::fail("a grant smaller than its part");
  part->state = LargePart::State::filling;
  link.filling[grant.grant] = {grant.seq, grant.part};
  actions_.push_back(
      FillGrant{link.connection, {grant.grant, grant.segment, grant.offset, grant.bytes}, bytes});
  if (mutant("done_before_filled")) {
    write(link, wire::make_frame(wire::FrameType::done, wire::Done{grant.grant}));
  }
}

void Session::acknowledged(std::uint64_t cum, std::span<const std::uint64_t> bitmap) {
  if (cum < outbox_.first() && bitmap.empty()) return;
  const bool plausible = outbox_.acknowledge(
      cum, bitmap, [this](std::uint64_t cookie) { actions_.push_back(Acked{cookie}); });
  if (!plausible) wire::fail("a message was acknowledged that was never sent");
  if (std::exchange(was_full_, false)) actions_.push_back(WindowOpened{});
}

}  // namespace moolink::session
