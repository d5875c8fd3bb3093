#include "session/links.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace moolink::session {

Link& Links::add(Time now, Link link) {
  link.last_heard = now;
  return links_[link.connection] = std::move(link);
}

void Links::attach(Time now, Link& link) {
  link.attached = true;
  link.generation = ++generation_;
  heard(now, link);
}

void Links::close_all(const Error& reason, ConnectionId except) {
  std::erase_if(links_, [&](const auto& entry) {
    if (entry.first == except) return false;
    sink_.add(CloseConnection{entry.first, reason});
    return true;
  });
}

Link* Links::find(ConnectionId connection) {
  const auto found = links_.find(connection);
  return found == links_.end() ? nullptr : &found->second;
}

Link* Links::find_attached(ConnectionId connection) {
  Link* link = find(connection);
  return link == nullptr || !link->attached ? nullptr : link;
}

bool Links::any_attached() const {
  return std::ranges::any_of(links_, [](const auto& entry) { return entry.second.attached; });
}

const Link* Links::best(Time now) const {
  const Link* best = nullptr;
  const auto rank = [&](const Link& link) {
    return std::tuple(!silent_for(now, link.last_heard, timing_.suspect_after),
                      link.traits.preference, link.generation);
  };
  for (const auto& [connection, link] : links_) {
    if (link.attached && (best == nullptr || rank(*best) < rank(link))) best = &link;
  }
  return best;
}

// One connection for each path and dialling side: the dialler knows best that the old one is gone.
// (If both sides dial at once, two remain; otherwise each side could close the other's.)
std::vector<ConnectionId> Links::replaced_by(const Link& link) const {
  std::vector<ConnectionId> replaced;
  for (const auto& [connection, other] : links_) {
    if (other.attached && &other != &link && other.kind == link.kind &&
        other.dialled == link.dialled) {
      replaced.push_back(connection);
    }
  }
  return replaced;
}

std::vector<LinkInfo> Links::infos(Time now) const {
  std::vector<LinkInfo> infos;
  const Link* used = best(now);
  for (const auto& [connection, link] : links_) {
    if (!link.attached) continue;
    infos.push_back({connection, link.kind, link.traits.preference, &link == used,
                     now - link.last_heard, link.round_trip, link.last_round_trip});
  }
  std::ranges::stable_sort(infos, [](const LinkInfo& a, const LinkInfo& b) {
    return std::pair(a.in_use, a.preference) > std::pair(b.in_use, b.preference);
  });
  return infos;
}

void Links::heard(Time now, Link& link) {
  link.last_heard = now;
  if (link.attached) last_heard_ = now;
}

std::vector<ConnectionId> Links::stalled(Time now) const {
  std::vector<ConnectionId> stalled;
  const Link* used = best(now);
  if (used == nullptr || silent_for(now, used->last_heard, timing_.suspect_after)) return stalled;
  for (const auto& [connection, link] : links_) {
    if (link.attached && silent_for(now, link.last_heard, timing_.suspect_after)) {
      stalled.push_back(connection);
    }
  }
  return stalled;
}

void Links::ping(Time now, Link& link) {
  ++link.pings;
  link.ping_times[link.pings % link.ping_times.size()] = now;
  link.pinged_at = now;
  link.ping_at = now + timing_.ping_after;
  sink_.write(link.connection, wire::FrameType::ping, wire::Ping{link.pings});
}

// Ignores answers so late that many PINGs have followed: they say little.
void Links::pong(Time now, Link& link, std::uint64_t number) {
  if (number == 0 || number > link.pings || number + link.ping_times.size() <= link.pings) return;
  const Duration sample = now - link.ping_times[number % link.ping_times.size()];
  const bool first = link.round_trip < Duration(0);
  link.round_trip = first ? sample : link.round_trip + (sample - link.round_trip) / 8;
  link.last_round_trip = sample;
}

void Links::ping_quiet(Time now) {
  for (auto& [connection, link] : links_) {
    if (!link.attached || now < link.ping_at) continue;
    const bool quiet = now - link.last_heard >= timing_.ping_after;
    if (!quiet && now - link.pinged_at < timing_.measure_every) {
      link.ping_at = link.last_heard + timing_.ping_after;
      continue;
    }
    ping(now, link);
  }
}

Time Links::next_deadline(bool may_be_gone) const {
  Time next = kNever;
  for (const auto& [connection, link] : links_) next = std::min(next, link.ping_at);
  if (may_be_gone) {
    next = std::min(next, std::max(last_heard_ + timing_.evict_after, suspects_from_));
  }
  return next;
}

// A tick so late means that this process was stopped: it has not read what the peer sent meanwhile,
// so the peer's silence proves nothing.
void Links::ticked(Time now) {
  if (expected_tick_ != kNever && now > expected_tick_ + timing_.late_after) {
    suspects_from_ = now + timing_.trust_for;
  }
}

}  // namespace moolink::session
