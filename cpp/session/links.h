#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "session/actions.h"
#include "session/config.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::session {

// A connection of a session, as its Links know it.
struct Link {
  ConnectionId connection = 0;
  wire::PathKind kind = wire::PathKind::tcp;
  wire::PathTraits traits;
  bool dialled = false;
  wire::Hello greeting;                 // this side's, without the session's fields
  std::optional<std::uint64_t> said{};  // the session last named on it
  bool attached = false;                // both have named the same one: it carries messages
  std::size_t chunk_bytes = 0;          // the size both sides accept
  std::uint64_t generation = 0;         // the later one wins

  // Liveness.
  Time last_heard{};
  Time ping_at = kNever;
  std::uint64_t pings = 0;
  Time pinged_at{};
  std::array<Time, 8> ping_times{};  // of the last ones, by number
  Duration round_trip{-1};           // smoothed; negative: not measured yet
  Duration last_round_trip{-1};
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

// The connections of a session: which one is used, how long each and the peer have been silent, and
// their round trips. It writes PINGs, and judges; the Session owns it, closes what it names as
// replaced or stalled, and ends the session when the peer is_gone().
class Links {
 public:
  Links(const Timing& timing, ActionSink& sink) : timing_(timing), sink_(sink) {}

  Link& add(Time now, Link link);
  void attach(Time now, Link& link);
  bool remove(ConnectionId connection) { return links_.erase(connection) == 1; }
  // Closes all but one.
  void close_all(const Error& reason, ConnectionId except);

  Link* find(ConnectionId connection);
  Link* find_attached(ConnectionId connection);
  const std::map<ConnectionId, Link>& all() const { return links_; }
  bool empty() const { return links_.empty(); }
  bool any_attached() const;
  // The preferred live connection: first one that is heard, then by preference, then the latest.
  const Link* best(Time now) const;
  Link* best(Time now) { return const_cast<Link*>(std::as_const(*this).best(now)); }
  // The connections whose place this one takes.
  std::vector<ConnectionId> replaced_by(const Link& link) const;
  std::vector<LinkInfo> infos(Time now) const;  // the one in use first

  // ---- silence ----

  void heard(Time now, Link& link);
  void heard_of_peer(Time now) { last_heard_ = now; }
  Time last_heard() const { return last_heard_; }
  bool suspected(Time now) const { return silent_for(now, last_heard_, timing_.suspect_after); }
  bool is_gone(Time now) const { return silent_for(now, last_heard_, timing_.evict_after); }
  // Silent ones, while another works.
  std::vector<ConnectionId> stalled(Time now) const;

  void ping(Time now, Link& link);
  void pong(Time now, Link& link, std::uint64_t number);
  void ping_quiet(Time now);

  // When to call ping_quiet(), or to ask is_gone() if that matters.
  Time next_deadline(bool may_be_gone) const;
  // The next tick should come at `at`; this one has come.
  void expect_tick(Time at) { expected_tick_ = at; }
  void ticked(Time now);

 private:
  bool silent_for(Time now, Time since, Duration duration) const {
    return now >= suspects_from_ && now - since >= duration;
  }

  const Timing& timing_;
  ActionSink& sink_;
  std::map<ConnectionId, Link> links_;
  std::uint64_t generation_ = 0;
  Time last_heard_{};     // from the peer, on any attached connection
  Time suspects_from_{};  // suspects no peer before
  Time expected_tick_ = kNever;
};

}  // namespace moolink::session
