#include "session/session.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/barrier.h"

namespace moolink::session {

namespace {

constexpr std::size_t kChunkFrameRoom = 128;  // header and control of a chunk
constexpr std::uint64_t kMaxTtl = 10ULL * 365 * 24 * 3600 * 1000 * 1000;  // µs: ten years

Time deadline_of(Time now, std::uint64_t ttl_us) {
  if (ttl_us == 0) return kNever;
  return now + microseconds(std::min(ttl_us, kMaxTtl));
}

}  // namespace

Session::Session(Config config, Allocator& allocator)
    : config_(std::move(config)),
      acknowledgements_(config_.timing),
      receive_window_(config_.limits),
      sink_(acknowledgements_),
      handshake_(config_.self, config_.peer, config_.first_id),
      links_(config_.timing, sink_),
      loans_given_(sink_),
      sender_(config_.limits, loans_given_, sink_),
      peer_buffers_(config_.timing),
      preposted_(sink_),
      inbox_(config_.limits, allocator, acknowledgements_, preposted_, loans_held_) {}

template <class Work>
void Session::checked(Work&& work) {
  try {
    work();
  } catch (const Exception& broken) {
    lose(broken.error(), 0);
  }
}

void Session::drain(std::vector<Action>& into) {
  sink_.drain(into);
  links_.expect_tick(next_deadline());
}

// ---- greeting ----

void Session::attach(Time now, ConnectionId connection, wire::PathKind kind,
                     const wire::PathTraits& traits, bool dialled, wire::Hello ours) {
  Link& link = links_.add(now, {connection, kind, traits, dialled, std::move(ours)});
  if (!dialled) return;  // answers the WELCOME
  handshake_.begin();
  say_welcome(link);
}

void Session::say_welcome(Link& link) {
  link.said = handshake_.id();
  sink_.add(
      Write{link.connection, handshake_.welcome(link.greeting, acknowledgements_.complete())});
}

void Session::welcomed(Time now, Link& link, const wire::ReceivedFrame& frame) {
  if (link.attached) wire::fail("WELCOME on a connection that is in use");
  const wire::Hello theirs = wire::decode_hello(frame.control());
  const std::size_t frame_bytes =
      static_cast<std::size_t>(std::min<std::uint64_t>(theirs.max_frame, config_.limits.max_frame));
  if (frame_bytes < kInlineTotal) wire::fail("the peer's largest frame is too small");
  link.chunk_bytes =
      std::clamp<std::size_t>(link.traits.chunk_bytes, 1, frame_bytes - kChunkFrameRoom);
  const Handshake::Step step =
      handshake_.hear(theirs.session, Handshake::is_established(frame), link.said);
  if (step.outdated) {
    close_link(now, link.connection, make_error(ErrorCode::closed, "a greeting of the past"));
    return;
  }
  if (step.enter) {
    if (handshake_.id() != 0) {
      lose(make_error(ErrorCode::peer_lost, "the peer does not know the session any more"),
           link.connection);
    }
    handshake_.enter(*step.enter);
  }
  if (step.answer) say_welcome(link);
  if (step.attach) agreed(now, link, theirs);
}

void Session::agreed(Time now, Link& link, const wire::Hello& theirs) {
  links_.attach(now, link);
  sender_.attached(link);
  handshake_.agree();
  sender_.acknowledged(theirs.rx_next - 1, theirs.rx_have);
  sink_.add(Attached{link.connection});
  links_.ping(now, link);
  if (receive_window_.must_be_told()) write_window(link);
  for (const ConnectionId old : links_.replaced_by(link)) {
    close_link(
        now, old,
        make_error(ErrorCode::closed, "replaced by connection " + std::to_string(link.connection)));
  }
  write_waiting(now);
  if (acknowledgements_.is_due()) write_ack(now);
  write_returns(now);
}

// ---- connections ----

void Session::disconnected(Time now, ConnectionId connection) {
  if (!links_.remove(connection)) return;
  if (!ready()) links_.heard_of_peer(now);
  preposted_.disconnected(connection);
  inbox_.disconnected(connection);
  peer_buffers_.disconnected(connection);
  sender_.disconnected(connection);
  write_waiting(now);
  // The last WINDOW and ACK may be lost with the connection.
  if (const Link* link = links_.best(now); link != nullptr && receive_window_.has_changed()) {
    write_window(*link);
  }
  if (ready()) ack_due(now, 1);
}

void Session::close_link(Time now, ConnectionId connection, Error error) {
  sink_.add(CloseConnection{connection, std::move(error)});
  disconnected(now, connection);
}

void Session::write_waiting(Time now) {
  if (const Link* link = links_.best(now)) sender_.write_waiting(now, *link);
}

void Session::write_ack(Time now) {
  acknowledgements_.settle();
  const Link* link = links_.best(now);
  if (link == nullptr) return;  // the next greeting carries it
  sink_.write(link->connection, wire::FrameType::ack, acknowledgements_.ack());
}

void Session::ack_due(Time now, std::uint32_t messages) {
  if (acknowledgements_.due(now, messages)) write_ack(now);
}

void Session::write_window(const Link& link) {
  sink_.write(link.connection, receive_window_.frame());
}

void Session::set_receive_window(Time now, std::uint64_t bytes, std::uint64_t messages) {
  receive_window_.set(bytes, messages);
  if (const Link* link = links_.best(now)) write_window(*link);
}

std::optional<ConnectionId> Session::connection_in_use(Time now) const {
  const Link* best = ready() ? links_.best(now) : nullptr;
  return best == nullptr ? std::nullopt : std::optional(best->connection);
}

// ---- sending ----

bool Session::send(Time now, OutgoingMessage&& message) {
  check(message, config_.limits);
  if (!accepts(message.payload.bytes(), message.payload.parts.size(), message.held)) {
    tell_when_open();
    return false;
  }
  sender_.send(now, links_.best(now), std::move(message));
  return true;
}

void Session::grant_filled(Time, ConnectionId connection, std::uint64_t grant) {
  if (PartWriter* parts = sender_.parts_of(connection)) parts->filled(grant);
}

void Session::writable(Time, ConnectionId connection) {
  if (PartWriter* parts = sender_.parts_of(connection)) parts->writable();
}

void Session::segments_passed(Time now, ConnectionId connection, std::uint64_t seq, bool passed) {
  if (const Link* link = links_.find(connection)) sender_.segments_passed(now, *link, seq, passed);
}

std::optional<PeerBuffer> Session::take_preposted(Time now, std::uint64_t bytes) {
  const auto connection = connection_in_use(now);
  return connection ? peer_buffers_.take(*connection, bytes) : std::nullopt;
}

void Session::release_preposted(Time, ConnectionId connection, std::uint64_t grant) {
  if (links_.find_attached(connection) == nullptr) return;
  sink_.write(connection, wire::FrameType::done, wire::Done{grant});
}

// ---- receiving ----

void Session::received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame) {
  Link* link = links_.find(connection);
  if (link == nullptr) return;  // closed by this side
  checked([&] { dispatch(now, *link, frame); });
}

void Session::dispatch(Time now, Link& link, const wire::ReceivedFrame& frame) {
  links_.heard(now, link);
  if (frame.header.type == wire::FrameType::welcome) return welcomed(now, link, frame);
  if (!link.attached) wire::fail("a message before the greeting was done");
  const ConnectionId connection = link.connection;
  sender_.acknowledged(frame.header.ack, {});
  switch (frame.header.type) {
    case wire::FrameType::message:
      received_message(now, link, frame);
      break;
    case wire::FrameType::want: {
      const auto want = wire::decode_control<wire::Want>(frame);
      if (inbox_.requested(connection, want)) {
        sink_.add(AllocateGrant{connection, want.seq, want.part, want.bytes});
      }
      break;
    }
    case wire::FrameType::grant: {
      const auto grant = wire::decode_control<wire::Grant>(frame);
      if (grant.seq == 0) {
        peer_buffers_.add(now, connection, grant);
      } else {
        sender_.parts_of(connection)->ready(grant);
      }
      break;
    }
    case wire::FrameType::done: {
      const auto done = wire::decode_control<wire::Done>(frame);
      preposted_.offer(connection, link.traits, inbox_.filled(connection, done.grant));
      deliver_ready(now);
      break;
    }
    case wire::FrameType::ack: {
      const auto ack = wire::decode_control<wire::Ack>(frame);
      sender_.acknowledged(ack.cum, ack.bitmap);
      break;
    }
    case wire::FrameType::ping:
      sink_.write(connection, wire::FrameType::pong, wire::decode_control<wire::Ping>(frame));
      break;
    case wire::FrameType::pong:
      links_.pong(now, link, wire::decode_control<wire::Ping>(frame).number);
      break;
    case wire::FrameType::window:
      sender_.set_peer_window(wire::decode_control<wire::Window>(frame), frame.header.seq);
      break;
    default:
      wire::fail(std::string("an unexpected frame: ") + wire::kFrameTypes[frame.header.type]);
  }
  write_returns(now);
}

void Session::received_message(Time now, const Link& link, const wire::ReceivedFrame& frame) {
  const std::uint64_t seq = frame.header.seq;
  if (seq == 0) wire::fail("a message without a number");
  const auto head = wire::decode_message_head(frame.control(), config_.limits);
  if (acknowledgements_.complete().contains(seq)) return ack_due(now, 1);
  if (const auto known = inbox_.attempt_of(seq)) {
    if (head.attempt <= *known) return;
    close_writers(now, seq, link.connection);
  }
  inbox_.accept(seq, frame.header.lane, head, frame.payload(), link.connection,
                deadline_of(now, head.ttl_us));
  map_loans(link);
  preposted_.offer_again(link.connection, link.traits);
  deliver_ready(now);
}

// They end before a new attempt starts to write the message's memory.
void Session::close_writers(Time now, std::uint64_t seq, ConnectionId except) {
  const std::set<ConnectionId> writers = inbox_.writers(seq, except);
  for (const ConnectionId connection : writers) {
    close_link(now, connection, make_error(ErrorCode::closed, "the peer has left this path"));
  }
}

void Session::map_loans(const Link& link) {
  for (const Inbox::ToMap& part : inbox_.take_to_map()) {
    if (!link.traits.loans) wire::fail("a loan on a path that has none");
    sink_.add(MapLoan{link.connection, id(), part.seq, part.part, part.place});
  }
}

void Session::deliver_ready(Time now) {
  ack_due(now, inbox_.take_completed());
  write_returns(now);
  for (Inbound& inbound : inbox_.ready()) {
    if (inbound.kind == kReturnKind) {
      loans_given_.returned(inbound.body.bytes);
    } else {
      sink_.add(delivery_of(inbound));
    }
  }
  inbox_.ready().clear();
}

std::span<std::byte> Session::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  std::span<std::byte> bytes;
  if (links_.find_attached(connection) == nullptr) return bytes;
  checked([&] { bytes = inbox_.chunk_target(connection, head); });
  return bytes;
}

void Session::chunk_received(Time now, ConnectionId connection, const wire::ChunkHead& head) {
  Link* link = links_.find_attached(connection);
  if (link == nullptr) return;
  links_.heard(now, *link);
  checked([&] {
    if (inbox_.chunk_received(connection, head)) deliver_ready(now);
  });
}

void Session::grant_ready(Time, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                          const wire::GrantPlace& place, MutableBuffer memory) {
  if (links_.find_attached(connection) == nullptr) return;
  if (seq == 0) return preposted_.post(connection, place, std::move(memory));
  const bool refused = memory.empty();
  if (!inbox_.granted(connection, seq, part, place.grant, std::move(memory))) return;
  wire::Grant grant{.seq = seq, .part = part};
  if (!refused) grant = {place.grant, seq, part, place.bytes, place.segment, place.offset};
  sink_.write(connection, wire::FrameType::grant, grant);
}

void Session::loan_mapped(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                          Buffer bytes, const Error& error) {
  if (!has(connection)) return;
  if (error.code == ErrorCode::wire) return lose(error, 0);
  checked([&] {
    inbox_.mapped(connection, seq, part, std::move(bytes), error);
    deliver_ready(now);
  });
}

void Session::return_loans(Time now, std::uint64_t session, std::span<const std::uint64_t> loans) {
  // Loans of a lost session have been returned already.
  if (session != id()) return;
  for (const std::uint64_t loan : loans) loans_held_.end(loan);
  write_returns(now);
}

// As far as the window allows; the rest follows when it opens.
void Session::write_returns(Time now) {
  while (loans_held_.has_returns() && ready()) {
    OutgoingMessage message = loans_held_.next_returns();
    if (!sender_.has_room(message.payload.body.size(), 0, false)) return;
    loans_held_.sent();
    sender_.send(now, links_.best(now), std::move(message));
  }
}

// ---- time ----

void Session::tick(Time now) {
  links_.ticked(now);
  if (now >= acknowledgements_.deadline()) write_ack(now);
  for (const PeerBuffer& idle : peer_buffers_.take_idle(now)) {
    release_preposted(now, idle.connection, idle.place.grant);
  }
  links_.ping_quiet(now);
  if (may_fall_silent() && links_.is_gone(now)) {
    return lose(make_error(ErrorCode::peer_lost, "the peer was silent for too long"), 0);
  }
  for (const ConnectionId connection : links_.stalled(now)) {
    close_link(now, connection,
               make_error(ErrorCode::peer_lost, "the path stalled, another one works"));
  }
}

// A session offered on a connection that broke before the answer is kept as long as any other: the
// peer may have agreed, and sent messages in it.
bool Session::may_fall_silent() const { return ready() || (id() != 0 && links_.empty()); }

Time Session::next_deadline() const {
  return std::min({acknowledgements_.deadline(), peer_buffers_.next_deadline(),
                   links_.next_deadline(may_fall_silent())});
}

// ---- the end of a session ----

void Session::end(const Error& reason, bool send_close) {
  if (send_close) {
    const auto say = [&] {
      const wire::Close close{reason.code, reason.message};
      for (const auto& [connection, link] : links_.all()) {
        if (link.attached) sink_.write(connection, wire::FrameType::close, close);
      }
    };
    guard(say, [](const Error&) {});  // the connections end all the same
  }
  lose(reason, 0);
}

// Ends the session with all its connections but `except`.
void Session::lose(Error reason, ConnectionId except) {
  links_.close_all(reason, except);
  loans_given_.clear();
  loans_held_.clear();
  Lost lost{std::move(reason), sender_.clear()};
  inbox_.clear();
  preposted_.clear();
  peer_buffers_.clear();
  acknowledgements_.clear();
  receive_window_.clear();
  const bool had_session = id() != 0;
  handshake_.lost();
  if (had_session) sink_.add(std::move(lost));
}

}  // namespace moolink::session
