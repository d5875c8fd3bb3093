// Chooses among the paths to the peer, and sends again, over another path, the messages that a lost
// path may not have delivered. The receiver drops duplicates: receiving.cc.

#include <tuple>

#include "base/mutant.h"
#include "session/session.h"

namespace moolink::session {

// The preferred live path: first one that is heard, then by preference, then the latest.
const Link* Session::best_link(Time now) const {
  const Link* best = nullptr;
  const auto rank = [&](const Link& link) {
    return std::tuple(!silent_for(now, link.last_heard, config_.timing.suspect_after),
                      link.traits.preference, link.generation);
  };
  for (const auto& [connection, link] : links_) {
    if (link.attached && (best == nullptr || rank(*best) < rank(link))) best = &link;
  }
  return best;
}

void Session::disconnected(Time now, ConnectionId connection) {
  if (links_.erase(connection) == 0) return;
  if (!ready_) last_heard_ = now;
  inbox_.disconnected(connection);
  if (mutant("no_failover")) return;
  outbox_.unassign(connection);
  write_unassigned(now);
  // The last WINDOW and ACK may be lost with the connection.
  if (Link* link = best_link(now); link != nullptr && window_number_ > 0) write_window(*link);
  if (ready_) ack_due(now, 1);
}

void Session::close_link(Time now, ConnectionId connection, Error error) {
  actions_.push_back(CloseConnection{connection, std::move(error)});
  disconnected(now, connection);
}

void Session::write_unassigned(Time now) {
  Link* link = best_link(now);
  if (link == nullptr) return;
  for (std::uint64_t seq = outbox_.first(); seq <= outbox_.last(); ++seq) {
    const Outgoing* outgoing = outbox_.find(seq);
    if (outgoing != nullptr && outgoing->connection == 0) write_message(now, *link, seq);
  }
}

}  // namespace moolink::session
