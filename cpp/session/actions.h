#pragma once

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/time.h"
#include "base/uid.h"
#include "session/feedback.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::session {

using wire::ConnectionId;

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

// On paths with grants: answered by grant_ready. seq 0: a pre-posted buffer.
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

using Action = std::variant<Write, Attached, Deliver, Acked, WindowOpened, AllocateGrant, FillGrant,
                            PassSegments, MapLoan, CloseConnection, Lost>;

// Where all components of a session put their actions, to be carried out in the order of the calls.
// The Session owns it and drains it. The acknowledgement that every frame carries is added here, so
// a component can write a frame without knowing of it.
class ActionSink {
 public:
  explicit ActionSink(Acknowledgements& acknowledgements) : acknowledgements_(acknowledgements) {}

  template <class Kind>
  void add(Kind&& action) {
    actions_.emplace_back(std::forward<Kind>(action));
  }
  // Writes a frame to an attached connection.
  void write(ConnectionId connection, wire::Frame frame) {
    acknowledgements_.stamp(frame.header);
    add(Write{connection, std::move(frame)});
  }
  template <class Control>
  void write(ConnectionId connection, wire::FrameType type, const Control& control) {
    write(connection, wire::make_frame(type, control));
  }
  // Gives the actions since the last call; the vector's memory is used again.
  void drain(std::vector<Action>& into) {
    into.clear();
    into.swap(actions_);
  }

 private:
  Acknowledgements& acknowledgements_;
  std::vector<Action> actions_;
};

}  // namespace moolink::session
