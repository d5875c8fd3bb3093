// Measures the peer's silence: pings, suspicion, stalled paths, the end of the session.

#include <algorithm>
#include <vector>

#include "session/session.h"

namespace moolink::session {

void Session::tick(Time now) {
  // A tick so late means that this process was stopped: it has not read what the peer sent
  // meanwhile, so the peer's silence proves nothing.
  if (expected_tick_ != kNever && now > expected_tick_ + config_.timing.late_after) {
    suspects_from_ = now + config_.timing.trust_for;
  }
  if (now >= ack_at_) write_ack(now);
  return_idle_standing(now);
  watch_links(now);
}

bool Session::silent_for(Time now, Time since, Duration duration) const {
  return now >= suspects_from_ && now - since >= duration;
}

// A session offered on a connection that broke before the answer is kept as long as any other: the
// peer may have agreed, and sent messages in it.
bool Session::may_fall_silent() const { return ready_ || (id_ != 0 && links_.empty()); }

void Session::watch_links(Time now) {
  const Timing& timing = config_.timing;
  for (auto& [connection, link] : links_) {
    if (!link.attached || now < link.ping_at) continue;
    const bool quiet = now - link.last_heard >= timing.ping_after;
    if (!quiet && now - link.pinged_at < timing.measure_every) {
      link.ping_at = link.last_heard + timing.ping_after;
      continue;
    }
    write_ping(now, link);
  }
  if (may_fall_silent() && silent_for(now, last_heard_, timing.evict_after)) {
    lose(make_error(ErrorCode::peer_lost, "the peer was silent for too long"), 0);
    return;
  }
  const Link* best = best_link(now);
  if (best == nullptr || silent_for(now, best->last_heard, timing.suspect_after)) return;
  std::vector<ConnectionId> stalled;  // while another path works
  for (const auto& [connection, link] : links_) {
    if (link.attached && silent_for(now, link.last_heard, timing.suspect_after)) {
      stalled.push_back(connection);
    }
  }
  for (const ConnectionId connection : stalled) {
    close_link(now, connection,
               make_error(ErrorCode::peer_lost, "the path stalled, another one works"));
  }
}

Time Session::next_deadline() const {
  Time next = std::min(ack_at_, standing_deadline());
  for (const auto& [connection, link] : links_) next = std::min(next, link.ping_at);
  if (may_fall_silent()) {
    next = std::min(next, std::max(last_heard_ + config_.timing.evict_after, suspects_from_));
  }
  return next;
}

bool Session::suspected(Time now) const {
  return silent_for(now, last_heard_, config_.timing.suspect_after);
}

}  // namespace moolink::session
