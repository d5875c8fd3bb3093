#pragma once

// The stream of messages between two peer instances: one Session at each end. It outlives its
// connections: frames that a lost path may have dropped are written again on the next one, and
// duplicates are dropped, so a message is delivered at most once always and exactly once while both
// instances and the session live. docs/design/protocol/session.md holds the tables.
//
// A machine: events in, actions out; no clock, no I/O. Bytes are passed by reference, never copied.
// `now` never goes back.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/time.h"
#include "base/uid.h"
#include "session/inbox.h"
#include "session/link.h"
#include "session/outbox.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::session {

using wire::ConnectionId;

struct Timing {
  Duration ping_after = milliseconds(250);  // quiet for this long: ask
  Duration measure_every = seconds(5);      // the round trip, on a connection that is never quiet
  Duration suspect_after = seconds(1);      // silent for this long: use another path
  Duration evict_after = seconds(3);        // silent for this long: the session is lost
  Duration late_after = milliseconds(500);  // a tick so late means that this side was stopped,
  Duration trust_for = seconds(1);          // and it suspects no peer for this long
  Duration ack_after = milliseconds(25);    // acknowledge without other traffic to carry it
  std::uint32_t ack_every = 16;             // ... or after this many messages
  Duration standing_for = seconds(5);       // a standing grant unused for this long is returned
};

struct Config {
  Uid self;
  Uid peer;
  std::uint64_t first_id = 0;  // ids of sessions are above it; rises with each Session of a process
  Limits limits;
  Timing timing;
};

// ---- actions, to be carried out in order ----

struct Write {
  ConnectionId connection;
  wire::Frame frame;
};

// The peer and this side agree about the session on this connection: it carries messages now.
struct Attached {
  ConnectionId connection;
};

struct Deliver {
  std::uint16_t lane;
  std::uint8_t kind;
  Time deadline;  // this side's clock; kNever: none
  wire::Payload payload;
  Error error;  // set: no memory for the parts, the payload has its body only
};

// The peer has the whole message; the sender's bytes are free.
struct Acked {
  std::uint64_t cookie;
};

// The peer takes calls again after a WINDOW of zero, or the send window has room again.
struct WindowOpened {};

// On paths with grants: answered by grant_ready. seq 0: a standing grant.
struct AllocateGrant {
  ConnectionId connection;
  std::uint64_t seq;
  std::uint32_t part;
  std::uint64_t bytes;
};

// Copy the bytes into the peer's grant; answered by grant_filled.
struct FillGrant {
  ConnectionId connection;
  wire::GrantPlace place;
  Buffer bytes;
};

// On paths with loans, before a message that lends parts of these segments is written: lets the
// peer map them; answered by segments_passed.
struct PassSegments {
  ConnectionId connection;
  std::uint64_t seq;
  std::vector<std::uint64_t> segments;
};

// A part is in the peer's memory: find it; answered by loan_mapped. When its last reference is
// gone, call return_loans() with this session.
struct MapLoan {
  ConnectionId connection;
  std::uint64_t session;
  std::uint64_t seq;
  std::uint32_t part;
  wire::LoanPlace place;
};

// Ignores later frames of the connection, and allows no more writes into memory that
// chunk_target or a grant gave it.
struct CloseConnection {
  ConnectionId connection;
  Error error;
  Uid peer{};  // empty: it has not proven who it is
};

struct LostMessage {
  std::uint64_t cookie;
  Ran written;  // no: not a byte left this side; maybe: the peer may have it
};

// The session has ended; its messages are lost. All its connections have been closed.
struct Lost {
  Error reason;
  std::vector<LostMessage> messages;  // never acknowledged, in order of sending
};

// The state of a connection that carries messages.
struct LinkInfo {
  ConnectionId connection = 0;
  wire::PathKind kind = wire::PathKind::tcp;
  int preference = 0;
  bool in_use = false;      // messages sent now use it
  Duration silent{};        // nothing heard for this long
  Duration round_trip{-1};  // smoothed; negative: not measured yet
  Duration last_round_trip{-1};
};

using Action = std::variant<Write, Attached, Deliver, Acked, WindowOpened, AllocateGrant, FillGrant,
                            PassSegments, MapLoan, CloseConnection, Lost>;

class Session {
 public:
  // `allocator` provides memory for parts received as chunks.
  Session(Config config, Allocator& allocator);

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

  // ---- standing grants ----

  // A place in the peer's memory for a part of this size, if there is one: the caller fills it, and
  // then places the part in a message or releases the grant.
  struct StandingPlace {
    ConnectionId connection = 0;
    wire::GrantPlace place;
  };
  std::optional<StandingPlace> take_standing(Time now, std::uint64_t bytes);
  void release_standing(Time now, ConnectionId connection, std::uint64_t grant);

  // Of the path used now, if there is any.
  std::optional<ConnectionId> connection_in_use(Time now) const;

  // ---- messages ----

  // True once both sides have agreed about a session, until it is lost.
  bool ready() const { return ready_; }
  // Whether send() would take a message of this size and number of parts now. `held`: one that the
  // peer may hold back with WINDOW (calls; never replies, which the peer's calls wait for).
  bool accepts(std::size_t bytes, std::size_t parts, bool held) const {
    return ready_ && outbox_.has_room(bytes, parts, held);
  }
  // WindowOpened will come: the caller has something that accepts() refused.
  void tell_when_open() { was_full_ = true; }
  // Takes the message. Returns false and leaves it if this is not ready(), or the window is full:
  // then WindowOpened will come. Throws as check().
  bool send(Time now, OutgoingMessage&& message);
  // No reference to these loans of the peer's session is left here.
  void return_loans(Time now, std::uint64_t session, std::span<const std::uint64_t> loans);
  // How many calls may be sent to this side: 0 stops the peer's calls, see accepts().
  void set_receive_window(Time now, std::uint64_t bytes, std::uint64_t messages);
  // Every message sent is acknowledged.
  bool flushed() const { return outbox_.empty(); }

  // ---- time and state ----

  void tick(Time now);
  Time next_deadline() const;
  // Ends the session: the peer is known to be dead, or has sent CLOSE, or this side closes.
  // `send_close`: send CLOSE on each connection first.
  void end(const Error& reason, bool send_close);

  // No session and no connection is left.
  bool ended() const { return id_ == 0 && links_.empty(); }
  bool connected() const;  // over a connection that carries messages
  bool has_connection() const { return !links_.empty(); }
  bool has(ConnectionId connection) const { return links_.contains(connection); }
  bool suspected(Time now) const;               // connected, but silent for suspect_after
  std::vector<LinkInfo> links(Time now) const;  // the one in use first
  Time last_heard() const { return last_heard_; }
  std::uint64_t id() const { return id_; }
  std::uint64_t unacknowledged_bytes() const { return outbox_.bytes(); }
  std::size_t loans_given() const { return lent_.size(); }  // and not returned
  std::size_t loans_held() const { return inbox_.borrowed(); }
  std::size_t standing_given() const { return inbox_.standing(); }  // to the peer, and not used

  // The actions since the last call; the vector's memory is used again.
  void drain(std::vector<Action>& into);

 private:
  using Links = std::map<ConnectionId, Link>;

  // agreement.cc
  bool chooses() const { return config_.self < config_.peer; }
  void welcomed(Time now, Link& link, const wire::ReceivedFrame& frame);
  void welcomed_as_chooser(Time now, Link& link, const wire::Hello& theirs);
  void welcomed_as_follower(Time now, Link& link, const wire::Hello& theirs, bool established);
  void agreed(Time now, Link& link, const wire::Hello& theirs);
  void say_welcome(Link& link);
  bool has_usual_window() const;
  std::uint64_t next_id();
  void restart(std::uint64_t id, ConnectionId except);

  // receiving.cc
  // A violation of the protocol in `work` ends the session.
  template <class Work>
  void checked(Work&& work);
  void dispatch(Time now, Link& link, const wire::ReceivedFrame& frame);
  void received_message(Time now, Link& link, const wire::ReceivedFrame& frame);
  void received_grant(Time now, Link& link, const wire::Grant& grant);
  void received_pong(Time now, Link& link, std::uint64_t number);
  void close_writers(Time now, std::uint64_t seq, ConnectionId except);
  void ack_due(Time now, std::uint32_t messages);
  void deliver_ready(Time now);
  void acknowledged(std::uint64_t cum, std::span<const std::uint64_t> bitmap);

  // sending.cc
  void write(Link& link, wire::Frame frame);
  void write_ack(Time now);
  void write_ping(Time now, Link& link);
  void write_window(Link& link);
  void write_message(Time now, Link& link, std::uint64_t seq);
  static void plan_parts(Outgoing& outgoing, const wire::MessageHead& head);
  static void take_turn(Link& link, std::uint64_t seq, Outgoing& outgoing);
  void write_parts(Link& link);
  void ask_for_grant(Link& link, std::uint64_t seq, Outgoing& outgoing);
  void write_chunk(Link& link, std::uint64_t seq, Outgoing& outgoing);
  bool write_part(Link& link, std::uint64_t seq, Outgoing& outgoing);

  // lending.cc
  static bool may_lend(const Link& link, Outgoing& outgoing, std::size_t which);
  bool asks_to_lend(const Link& link, std::uint64_t seq, Outgoing& outgoing);
  bool lend(const Link& link, Outgoing& outgoing, std::size_t which, wire::PartHead& part);
  void map_loans(const Link& link);
  void give_back(Time now, std::span<const std::uint64_t> loans);
  void write_returns(Time now);
  void loans_returned(const Buffer& body);

  // standing_grants.cc
  void offer_standing(const Link& link, std::uint64_t bytes);
  void offer_standing_again(const Link& link);
  void standing_ready(Time now, Link& link, const wire::GrantPlace& place, MutableBuffer memory);
  void received_standing(Time now, Link& link, const wire::Grant& grant);
  void place_parts(const Link& link, Outgoing& outgoing, wire::MessageHead& head);
  void return_idle_standing(Time now);
  Time standing_deadline() const;

  // failover.cc
  const Link* best_link(Time now) const;
  Link* best_link(Time now) { return const_cast<Link*>(std::as_const(*this).best_link(now)); }
  void close_link(Time now, ConnectionId connection, Error error);
  void write_unassigned(Time now);

  // silence.cc
  bool silent_for(Time now, Time since, Duration duration) const;
  bool may_fall_silent() const;
  void watch_links(Time now);

  // session.cc
  void lose(Error reason, ConnectionId except);
  Link* find(ConnectionId connection);

  Config config_;
  std::vector<Action> actions_;
  Links links_;
  std::uint64_t generation_ = 0;  // of connections: the later one wins

  std::uint64_t id_ = 0;
  std::uint64_t sessions_ = 0;  // begun by this side
  std::uint64_t newest_ = 0;    // named by the choosing side
  bool confirmed_ = false;      // the peer has named id_
  bool ready_ = false;

  Outbox outbox_;
  Inbox inbox_;

  // Loans given and not returned: beyond the acknowledgement.
  struct Loan {
    Buffer bytes;
    std::shared_ptr<std::atomic<bool>> out;  // LentPart::out
  };
  std::map<std::uint64_t, Loan> lent_;
  std::uint64_t last_loan_ = 0;            // of this session
  std::deque<std::uint64_t> returns_due_;  // not reported yet

  std::uint32_t acks_due_ = 0;
  Time ack_at_ = kNever;
  wire::Window receive_window_;      // as the peer was told, or will be
  std::uint64_t window_number_ = 0;  // in the order of sending: the frames may overtake each other
  bool was_full_ = false;            // a message was refused since WindowOpened

  Time last_heard_{};
  Time suspects_from_{};  // suspects no peer before
  Time expected_tick_ = kNever;
};

}  // namespace moolink::session
