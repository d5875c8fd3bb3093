// How two sides agree about a session on a new connection. The side with the smaller instance id
// chooses session ids, the other follows; they speak in turn, the dialler first, until both have
// named the same id. See docs/design/protocol/session.md, "Greeting".

#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "session/session.h"

namespace moolink::session {

namespace {

// WELCOME: the chooser names a session that the follower has taken part in before.
constexpr std::uint8_t kEstablished = 1;
constexpr std::size_t kChunkFrameRoom = 128;  // header and control of a chunk

Error restarted() {
  return make_error(ErrorCode::peer_lost, "the peer does not know the session any more");
}

}  // namespace

void Session::say_welcome(Link& link) {
  wire::Hello welcome = link.ours;
  welcome.session = id_;
  welcome.rx_next = inbox_.complete().cum() + 1;
  welcome.rx_have = inbox_.complete().bitmap();
  if (welcome.rx_have.size() > wire::kMaxHaveWords) welcome.rx_have.resize(wire::kMaxHaveWords);
  link.said = id_;
  wire::Frame frame = wire::make_frame(wire::FrameType::welcome, welcome);
  frame.header.flags = confirmed_ ? kEstablished : 0;
  actions_.push_back(Write{link.connection, std::move(frame)});
}

void Session::welcomed(Time now, Link& link, const wire::ReceivedFrame& frame) {
  if (link.attached) wire::fail("WELCOME on a connection that is in use");
  const wire::Hello theirs = wire::decode_hello(frame.control());
  const std::size_t frame_bytes =
      static_cast<std::size_t>(std::min<std::uint64_t>(theirs.max_frame, config_.limits.max_frame));
  if (frame_bytes < kInlineTotal) wire::fail("the peer's largest frame is too small");
  link.chunk_bytes =
      std::clamp<std::size_t>(link.traits.chunk_bytes, 1, frame_bytes - kChunkFrameRoom);
  if (chooses()) {
    welcomed_as_chooser(now, link, theirs);
  } else {
    welcomed_as_follower(now, link, theirs, (frame.header.flags & kEstablished) != 0);
  }
}

void Session::welcomed_as_chooser(Time now, Link& link, const wire::Hello& theirs) {
  if (id_ != 0 && theirs.session == id_) {
    if (link.said != id_) say_welcome(link);
    agreed(now, link, theirs);
    return;
  }
  // Only the answer to our naming of the session, on this very connection, proves that the peer
  // does not have it: an earlier frame may have crossed the greeting of another connection.
  const bool proven = link.said == id_;
  if (id_ == 0 || proven) restart(next_id(), link.connection);
  say_welcome(link);
}

void Session::welcomed_as_follower(Time now, Link& link, const wire::Hello& theirs,
                                   bool established) {
  const std::uint64_t named = theirs.session;
  if (named == 0) wire::fail("the choosing side named no session");
  if (named < newest_) {  // sent before the session that we know, on a slower connection
    close_link(now, link.connection, make_error(ErrorCode::closed, "a greeting of the past"));
    return;
  }
  if (named != id_) {
    // A session that the peer knows us in and we do not, or that we had and lost: it is never
    // entered again at its beginning.
    const bool forgotten = established || named == newest_;
    newest_ = named;
    if (forgotten && !mutant("resume_unknown_session")) {
      restart(0, link.connection);
      say_welcome(link);
      return;
    }
    restart(named, link.connection);
  }
  if (link.said != id_) say_welcome(link);
  agreed(now, link, theirs);
}

// Session ids rise, so that the follower recognizes an old one.
std::uint64_t Session::next_id() { return config_.first_id + ++sessions_; }

bool Session::has_usual_window() const {
  return receive_window_.bytes == Limits{}.send_window_bytes &&
         receive_window_.messages == Limits{}.send_window_messages;
}

// Leaves the present session, if any, for the one called `id`, or for none.
void Session::restart(std::uint64_t id, ConnectionId except) {
  if (id_ != 0) lose(restarted(), except);
  id_ = id;
}

void Session::agreed(Time now, Link& link, const wire::Hello& theirs) {
  link.attached = true;
  link.generation = ++generation_;
  link.last_heard = now;
  last_heard_ = now;
  confirmed_ = true;
  ready_ = true;
  acknowledged(theirs.rx_next - 1, theirs.rx_have);
  actions_.push_back(Attached{link.connection});
  write_ping(now, link);

  // One connection for each path and dialling side: the dialler knows best that the old one is
  // gone. (If both sides dial at once, two remain; otherwise each side could close the other's.)
  std::vector<ConnectionId> replaced;
  for (const auto& [connection, other] : links_) {
    if (other.attached && &other != &link && other.kind == link.kind &&
        other.dialled == link.dialled) {
      replaced.push_back(connection);
    }
  }
  const ConnectionId connection = link.connection;
  // The last WINDOW may be lost with the connection that carried it.
  if (window_number_ > 0 || !has_usual_window()) write_window(link);
  for (const ConnectionId old : replaced) {
    close_link(
        now, old,
        make_error(ErrorCode::closed, "replaced by connection " + std::to_string(connection)));
  }
  if (!mutant("no_replay_after_reconnect")) write_unassigned(now);
  if (acks_due_ > 0) write_ack(now);
  write_returns(now);
}

}  // namespace moolink::session
