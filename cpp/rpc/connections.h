#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/time.h"
#include "rpc/actions.h"
#include "rpc/connection_table.h"
#include "rpc/dialler.h"
#include "rpc/directory.h"
#include "rpc/log_limit.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::rpc {

// Connections from their opening to their end, and the greeting: HELLO of the dialler, HELLO of the
// acceptor with its proof, WELCOME of the dialler with its own; the sessions agree in this and
// further WELCOMEs. Before its proof a side changes nothing here; with it, it becomes a Peer, whose
// session gets the connection. A refusal is explained in the log, whose lines about unauthenticated
// sides are limited, and ends the calls that have no other way. docs/design/protocol/rpc.md holds
// the table. The Node owns this and passes it the events of transports.
class Connections {
 public:
  Connections(Shared& shared, Peers& peers, ConnectionTable& table, Dialler& dialler,
              Directory& directory)
      : shared_(shared), peers_(peers), table_(table), dialler_(dialler), directory_(directory) {}

  // A HELLO was made: this peer's name is known to others.
  bool has_greeted() const { return greetings_ > 0; }

  void opened(Time now, ConnectionId id, wire::PathKind kind, const wire::PathTraits& traits,
              const std::string& dialled);
  void dial_failed(Time now, const std::string& address, const Error& error);
  // The path refused a peer that tried to connect, or a handshake failed.
  void turned_away(Time now, const Error& error);
  // Logs it, unless the same was logged a moment ago: a peer that dials again and again is refused
  // each time.
  void warn_once(Time now, const std::string& text);
  // Whether a frame of this type is one for greeted(), and not for the session.
  static bool greets(const Connection& connection, wire::FrameType type);
  void greeted(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  // The time for the greeting is up.
  void greeting_due(Time now, ConnectionId id);
  // Removes a connection, also from its session if that has not dropped it itself.
  void drop(Time now, ConnectionId id, const Error& error, bool tell_transport);

 private:
  void open(Time now, ConnectionId id, wire::PathKind kind, const wire::PathTraits& traits,
            const std::string& dialled);
  void drop_after_opening(Time now, ConnectionId id, const std::string& dialled,
                          const Error& error);
  void dial_ended(Time now, const std::string& address, const Error& error);
  void redial(Time now, DialTarget& target, const Error& error, bool attached) {
    dialler_.failed(now, target, error, attached, directory_.tried(target.peer));
  }
  wire::Hello hello();
  void greet(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  void answer(Time now, Connection& connection);
  void answered(Time now, Connection& connection);
  void welcomed(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  void refused(Time now, Connection& connection, const wire::Refuse& refusal);
  void note_own_dial(const wire::Hello& hello);
  bool enter(Time now, Connection& connection);
  Error objection_to_name(Time now, const Connection& connection) const;
  void adopt(Connection& connection, const wire::Hello& theirs);
  void refuse(Time now, Connection& connection, Error error);
  void drop_refused(Time now, const Connection& connection, std::string name, const Error& error,
                    bool final);
  void fail_callers(Time now, const std::string& address, const std::string& name,
                    const Error& error);
  void log_limited(Time now, std::string text);

  Shared& shared_;
  Peers& peers_;
  ConnectionTable& table_;
  Dialler& dialler_;
  Directory& directory_;
  std::uint64_t greetings_ = 0;  // made by this side
  std::string last_warning_;
  Time warned_at_{};
  LogLimit log_limit_;
};

}  // namespace moolink::rpc
