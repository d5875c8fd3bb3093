#include "session/session.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/barrier.h"
#include "base/mutant.h"

namespace moolink::session {

Session::Session(Config config, Allocator& allocator)
    : config_(std::move(config)),
      outbox_(config_.limits),
      inbox_(config_.limits, allocator),
      receive_window_{config_.limits.send_window_bytes, config_.limits.send_window_messages} {}

void Session::attach(Time now, ConnectionId connection, wire::PathKind kind,
                     const wire::PathTraits& traits, bool dialled, wire::Hello ours) {
  Link& link = links_[connection];
  link.connection = connection;
  link.kind = kind;
  link.traits = traits;
  link.dialled = dialled;
  link.ours = std::move(ours);
  link.last_heard = now;
  if (!dialled) return;  // answers the WELCOME
  if (chooses() && id_ == 0) restart(next_id(), connection);
  say_welcome(link);
}

void Session::disconnected(Time now, ConnectionId connection) { drop_link(now, connection); }

void Session::received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame) {
  Link* link = find(connection);
  if (link == nullptr) return;  // closed by this side
  try {
    dispatch(now, *link, frame);
  } catch (const Exception& broken) {
    lose(broken.error(), 0);
  }
}

std::span<std::byte> Session::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return {};
  const std::span<std::byte> target = inbox_.chunk_target(connection, head);
  link->receiving_seq = target.empty() ? 0 : head.seq;
  return target;
}

void Session::chunk_received(Time now, ConnectionId connection, const wire::ChunkHead& head) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return;
  link->receiving_seq = 0;
  link->last_heard = now;
  last_heard_ = now;
  try {
    inbox_.chunk_received(connection, head);
    deliver_ready(now);
  } catch (const Exception& broken) {
    lose(broken.error(), 0);
  }
}

void Session::grant_ready(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                          const wire::GrantPlace& place, MutableBuffer memory) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return;
  if (seq == 0) return standing_ready(now, *link, place, std::move(memory));
  const bool refused = memory.empty();
  if (!inbox_.granted(connection, seq, part, place.grant, std::move(memory))) return;
  wire::Grant grant;
  grant.seq = seq;
  grant.part = part;
  if (!refused) {
    grant.grant = place.grant;
    grant.bytes = place.bytes;
    grant.segment = place.segment;
    grant.offset = place.offset;
  }
  write(*link, wire::make_frame(wire::FrameType::grant, grant));
}

void Session::grant_filled(Time, ConnectionId connection, std::uint64_t grant) {
  Link* link = find(connection);
  if (link == nullptr) return;
  const auto filling = link->filling.find(grant);
  if (filling == link->filling.end()) return;
  const auto [seq, part] = filling->second;
  link->filling.erase(filling);
  if (Outgoing* outgoing = outbox_.find(seq)) {
    outgoing->find_large(part)->state = LargePart::State::sent;
  }
  if (!mutant("done_before_filled")) {
    write(*link, wire::make_frame(wire::FrameType::done, wire::Done{grant}));
  }
  --link->grants_asked;
  write_parts(*link);
}

void Session::writable(Time, ConnectionId connection) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return;
  link->chunks_queued = 0;
  write_parts(*link);
}

bool Session::accepts(std::size_t bytes, std::size_t parts, bool held) const {
  return ready_ && outbox_.has_room(bytes, parts, held);
}

bool Session::send(Time now, OutgoingMessage message) {
  outbox_.check(message);
  if (!accepts(message.payload.bytes(), message.payload.parts.size(), message.held)) {
    was_full_ = true;
    return false;
  }
  const std::uint64_t seq = outbox_.push(std::move(message));
  if (Link* link = best_link(now)) write_message(now, *link, seq);
  return true;
}

void Session::set_receive_window(Time now, std::uint64_t bytes, std::uint64_t messages) {
  receive_window_ = {bytes, messages};
  ++window_number_;
  if (Link* link = best_link(now)) write_window(*link);
}

void Session::tick(Time now) {
  // A tick so late means that this process was stopped: it has not read what the peer sent
  // meanwhile, so the peer's silence proves nothing.
  if (expected_tick_ != kNever && now > expected_tick_ + config_.timing.late_after) {
    forgiving_until_ = now + config_.timing.forgive_for;
  }
  if (now >= ack_at_) write_ack(now);
  return_idle_standing(now);
  watch_links(now);
}

bool Session::silent_for(Time now, Time since, Duration duration) const {
  return now >= forgiving_until_ && now - since >= duration;
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
    next = std::min(next, std::max(last_heard_ + config_.timing.evict_after, forgiving_until_));
  }
  return next;
}

void Session::end(const Error& reason, bool farewell) {
  if (farewell) {
    const auto say = [&] {
      const wire::Close close{reason.code, reason.message};
      for (auto& [connection, link] : links_) {
        if (link.attached) write(link, wire::make_frame(wire::FrameType::close, close));
      }
    };
    guard(say, [](const Error&) {});  // the connections end all the same
  }
  lose(reason, 0);
}

bool Session::connected() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& entry) { return entry.second.attached; });
}

bool Session::suspected(Time now) const {
  return silent_for(now, last_heard_, config_.timing.suspect_after);
}

void Session::drain(std::vector<Action>& into) {
  into.clear();
  into.swap(actions_);
  expected_tick_ = next_deadline();
}

Link* Session::find(ConnectionId connection) {
  const auto found = links_.find(connection);
  return found == links_.end() ? nullptr : &found->second;
}

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

std::optional<ConnectionId> Session::connection_in_use(Time now) const {
  const Link* best = ready_ ? best_link(now) : nullptr;
  return best == nullptr ? std::nullopt : std::optional(best->connection);
}

std::vector<LinkInfo> Session::links(Time now) const {
  std::vector<LinkInfo> infos;
  const Link* best = best_link(now);
  for (const auto& [connection, link] : links_) {
    if (!link.attached) continue;
    infos.push_back({connection, link.kind, link.traits.preference, &link == best,
                     now - link.last_heard, link.round_trip, link.last_round_trip});
  }
  std::stable_sort(infos.begin(), infos.end(), [](const LinkInfo& a, const LinkInfo& b) {
    return std::pair(a.in_use, a.preference) > std::pair(b.in_use, b.preference);
  });
  return infos;
}

void Session::drop_link(Time now, ConnectionId connection) {
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
  drop_link(now, connection);
}

// Ends the session with all its connections but `except`.
void Session::lose(Error reason, ConnectionId except) {
  std::erase_if(links_, [&](const auto& entry) {
    if (entry.first == except) return false;
    actions_.push_back(CloseConnection{entry.first, reason});
    return true;
  });
  if (!mutant("loans_outlive_session")) lent_.clear();
  last_loan_ = 0;
  returns_due_.clear();
  Lost lost{std::move(reason), {}};
  for (Outgoing& outgoing : outbox_.clear()) {
    lost.messages.push_back({outgoing.message.cookie, outgoing.written ? Ran::maybe : Ran::no});
  }
  inbox_.clear();
  const bool had_session = id_ != 0;
  id_ = 0;
  confirmed_ = false;
  ready_ = false;
  was_full_ = false;
  acks_due_ = 0;
  ack_at_ = kNever;
  window_number_ = 0;
  receive_window_ = {config_.limits.send_window_bytes, config_.limits.send_window_messages};
  if (mutant("forget_pending_on_restart")) lost.messages.clear();
  if (had_session) actions_.push_back(std::move(lost));
}

}  // namespace moolink::session
