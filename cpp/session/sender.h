#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/limits.h"
#include "base/time.h"
#include "session/actions.h"
#include "session/links.h"
#include "session/loans.h"
#include "session/outbox.h"
#include "session/part_writer.h"
#include "wire/frame.h"

namespace moolink::session {

// The messages that this side sends, until the peer acknowledges them. Writes each to the
// connection that the Session names, its head first and then its large parts, and again to another
// one when that connection is lost; the receiver drops duplicates. Keeps to the peer's window, and
// says when it has room again. Owned by the Session; clear() returns what is lost with a session.
class Sender {
 public:
  Sender(const Limits& limits, LoansGiven& loans, ActionSink& sink)
      : outbox_(limits), loans_(loans), sink_(sink) {}

  // ---- messages ----

  bool has_room(std::uint64_t bytes, std::size_t parts, bool held) const {
    return outbox_.has_room(bytes, parts, held);
  }
  // WindowOpened will come.
  void tell_when_open() { was_full_ = true; }
  // Numbers the message, and writes it unless `link` is null. It has room, and was checked.
  void send(Time now, const Link* link, OutgoingMessage&& message);
  // Those that no connection has, or has any more.
  void write_waiting(Time now, const Link& link);
  std::uint64_t unacknowledged_bytes() const { return outbox_.bytes(); }
  bool flushed() const { return outbox_.empty(); }
  // All that is not acknowledged, in order of sending.
  std::vector<LostMessage> clear();

  // ---- connections ----

  void attached(const Link& link) {
    writers_.try_emplace(link.connection, link.connection, link.chunk_bytes, outbox_, sink_);
  }
  // Its messages wait, and begin again in write_waiting().
  void disconnected(ConnectionId connection) {
    writers_.erase(connection);
    outbox_.unassign(connection);
  }
  // For the large parts of a connection; null: it is not attached.
  PartWriter* parts_of(ConnectionId connection);
  // The answer to PassSegments.
  void segments_passed(Time now, const Link& link, std::uint64_t seq, bool passed);

  // ---- from the peer ----

  // Throws Exception{wire} if one was never sent.
  void acknowledged(std::uint64_t cum, std::span<const std::uint64_t> bitmap);
  void set_peer_window(const wire::Window& window, std::uint64_t number);

 private:
  void write(Time now, const Link& link, std::uint64_t seq);
  wire::MessageHead head_of(Time now, const Link& link, Outgoing& outgoing);
  void window_changed();

  Outbox outbox_;
  LoansGiven& loans_;
  ActionSink& sink_;
  std::map<ConnectionId, PartWriter> writers_;
  bool was_full_ = false;  // a message was refused since WindowOpened
};

}  // namespace moolink::session
