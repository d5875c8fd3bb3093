#pragma once

#include <cstdint>
#include <optional>

#include "base/uid.h"
#include "session/sequence_set.h"
#include "wire/frame.h"

namespace moolink::session {

// Which session both sides agree on. The side with the smaller instance id chooses session ids,
// which rise, the other follows; on each new connection they speak in turn, the dialler first,
// until both have named the same id. docs/design/protocol/session.md, "Greeting", has the table.
//
// Decides only: the Session owns it and carries out each Step. It ends the old session itself, as
// that concerns all components: lost(), then enter().
class Handshake {
 public:
  // What a WELCOME leads to, in this order.
  struct Step {
    bool outdated = false;                 // close the connection; nothing else
    std::optional<std::uint64_t> enter{};  // leave the session, if any, for this one; 0: for none
    bool answer = false;                   // name the session on this connection
    bool attach = false;                   // both have named it: the connection carries messages
  };

  Handshake(const Uid& self, const Uid& peer, std::uint64_t first_id)
      : chooses_(self < peer), last_id_(first_id) {}

  // 0: none. It may be one that the peer has not named yet.
  std::uint64_t id() const { return id_; }
  // The peer has named it, too.
  bool agreed() const { return agreed_; }

  // This side dials, and so speaks first.
  void begin();
  // The peer names a session, and says whether it was agreed on before. `said`: what this side has
  // named last on the same connection.
  Step hear(std::uint64_t named, bool established, std::optional<std::uint64_t> said);
  // `greeting` with the session, and with the messages that are complete here.
  wire::Frame welcome(wire::Hello greeting, const SequenceSet& complete) const;
  static bool is_established(const wire::ReceivedFrame& welcome);

  void enter(std::uint64_t id) { id_ = id; }
  void agree() { agreed_ = true; }
  // The session is lost.
  void lost() {
    id_ = 0;
    agreed_ = false;
  }

 private:
  Step hear_as_chooser(std::uint64_t named, std::optional<std::uint64_t> said);
  Step hear_as_follower(std::uint64_t named, bool established, std::optional<std::uint64_t> said);

  const bool chooses_;
  std::uint64_t last_id_;     // made here
  std::uint64_t newest_ = 0;  // named by the choosing side
  std::uint64_t id_ = 0;
  bool agreed_ = false;
};

}  // namespace moolink::session
