#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/time.h"
#include "session/actions.h"
#include "session/config.h"
#include "session/feedback.h"
#include "session/handshake.h"
#include "session/inbox.h"
#include "session/links.h"
#include "session/loans.h"
#include "session/outbox.h"
#include "session/preposted.h"
#include "session/sender.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::session {

// The stream of messages between two peer instances: one Session at each end. It outlives its
// connections: frames that a lost path may have dropped are written again on the next one, and
// duplicates are dropped, so a message is delivered at most once always and exactly once while both
// instances and the session live. docs/design/protocol/session.md holds the tables.
//
// A machine: events in, actions out; no clock, no I/O, no lock. Its owner, an rpc::Peer, calls it
// from one thread at a time, drains it after each event and carries the actions out in order. Bytes
// are passed by reference, never copied. `now` never goes back. A violation of the protocol, the
// peer's silence or end() lead to Lost; then it waits for the next session, over new connections.
//
// Its components have the state, and this class has the order in which an event concerns them.
class Session {
 public:
  // `allocator` provides memory for parts received as chunks.
  Session(Config config, Allocator& allocator);
  Session(const Session&) = delete;  // its components refer to one another
  Session& operator=(const Session&) = delete;

  // ---- connections ----

  // A connection to the peer has opened and its greeting was accepted. `ours` is the greeting with
  // all but the session's fields filled in. The dialling side sends WELCOME here; the accepting one
  // answers it, so pass it to received() next.
  void attach(Time now, ConnectionId connection, wire::PathKind kind,
              const wire::PathTraits& traits, bool dialled, wire::Hello ours);
  // The connection failed or was closed by the peer. No copier writes into a grant through it any
  // more, and no chunk is being received by it.
  void disconnected(Time now, ConnectionId connection);
  // WELCOME, MESSAGE, WANT, GRANT, DONE, ACK, PING, PONG, WINDOW.
  void received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame);
  // Where the bytes of a chunk belong; empty: read and discard them.
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head);
  void chunk_received(Time now, ConnectionId connection, const wire::ChunkHead& head);
  // An empty memory: none was available, the part comes as chunks.
  void grant_ready(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                   const wire::GrantPlace& place, MutableBuffer memory);
  void grant_filled(Time now, ConnectionId connection, std::uint64_t grant);
  // False: the peer cannot get all of them now; the message goes as bytes.
  void segments_passed(Time now, ConnectionId connection, std::uint64_t seq, bool passed);
  // The memory, or an error: code wire means an invalid place from the peer, which ends the
  // session; any other concerns only the message.
  void loan_mapped(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                   Buffer bytes, const Error& error);
  // The connection has little left to write: more chunks may come. Call it after chunks were
  // written, at once if the transport still has room, else as soon as it has.
  void writable(Time now, ConnectionId connection);

  // ---- pre-posted buffers ----

  // Memory of the peer for a part of this size, if there is any: the caller fills it, and then
  // places the part in a message or releases the buffer.
  std::optional<PeerBuffer> take_preposted(Time now, std::uint64_t bytes);
  void release_preposted(Time now, ConnectionId connection, std::uint64_t grant);

  // Of the path used now, if there is any.
  std::optional<ConnectionId> connection_in_use(Time now) const;

  // ---- messages ----

  // True once both sides have agreed about a session, until it is lost.
  bool ready() const { return handshake_.agreed(); }
  // Whether send() would take a message of this size and number of parts now. `held`: one that the
  // peer may hold back with WINDOW (calls; never replies, which the peer's calls wait for).
  bool accepts(std::size_t bytes, std::size_t parts, bool held) const {
    return ready() && sender_.has_room(bytes, parts, held);
  }
  // WindowOpened will come: the caller has something that accepts() refused.
  void tell_when_open() { sender_.tell_when_open(); }
  // Takes the message. Returns false and leaves it if this is not ready(), or the window is full:
  // then WindowOpened will come. Throws as check().
  bool send(Time now, OutgoingMessage&& message);
  // No reference to these loans of the peer's session is left here.
  void return_loans(Time now, std::uint64_t session, std::span<const std::uint64_t> loans);
  // How many calls may be sent to this side: 0 stops the peer's calls, see accepts().
  void set_receive_window(Time now, std::uint64_t bytes, std::uint64_t messages);
  // Every message sent is acknowledged.
  bool flushed() const { return sender_.flushed(); }

  // ---- time and state ----

  void tick(Time now);
  Time next_deadline() const;
  // Ends the session: the peer is known to be dead, or has sent CLOSE, or this side closes.
  // `send_close`: send CLOSE on each connection first.
  void end(const Error& reason, bool send_close);

  // No session and no connection is left.
  bool ended() const { return id() == 0 && links_.empty(); }
  // Over a connection that carries messages.
  bool connected() const { return links_.any_attached(); }
  bool has_connection() const { return !links_.empty(); }
  bool has(ConnectionId connection) const { return links_.all().contains(connection); }
  // Connected, but silent for suspect_after.
  bool suspected(Time now) const { return links_.suspected(now); }
  std::vector<LinkInfo> links(Time now) const { return links_.infos(now); }
  Time last_heard() const { return links_.last_heard(); }
  std::uint64_t id() const { return handshake_.id(); }
  std::uint64_t unacknowledged_bytes() const { return sender_.unacknowledged_bytes(); }
  std::size_t loans_given() const { return loans_given_.size(); }  // and not returned
  std::size_t loans_held() const { return loans_held_.size(); }
  std::size_t preposted() const { return preposted_.size(); }  // to the peer, and not used

  // The actions since the last call; the vector's memory is used again.
  void drain(std::vector<Action>& into);

 private:
  // A violation of the protocol in `work` ends the session.
  template <class Work>
  void checked(Work&& work);

  // Greeting.
  void say_welcome(Link& link);
  void welcomed(Time now, Link& link, const wire::ReceivedFrame& frame);
  void agreed(Time now, Link& link, const wire::Hello& theirs);

  // Connections.
  void close_link(Time now, ConnectionId connection, Error error);
  void write_waiting(Time now);
  void write_ack(Time now);
  void ack_due(Time now, std::uint32_t messages);
  void write_window(const Link& link);
  bool may_fall_silent() const;

  // Receiving.
  void dispatch(Time now, Link& link, const wire::ReceivedFrame& frame);
  void received_message(Time now, const Link& link, const wire::ReceivedFrame& frame);
  void close_writers(Time now, std::uint64_t seq, ConnectionId except);
  void map_loans(const Link& link);
  void deliver_ready(Time now);
  void write_returns(Time now);

  void lose(Error reason, ConnectionId except);

  const Config config_;
  Acknowledgements acknowledgements_;
  ReceiveWindow receive_window_;
  ActionSink sink_;
  Handshake handshake_;
  Links links_;
  LoansGiven loans_given_;
  Sender sender_;
  PeerBuffers peer_buffers_;
  LoansHeld loans_held_;
  PrepostedBuffers preposted_;
  Inbox inbox_;
};

}  // namespace moolink::session
