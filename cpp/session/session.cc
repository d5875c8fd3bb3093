#include "session/session.h"

#include <algorithm>
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

void Session::grant_ready(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                          const wire::GrantPlace& place, MutableBuffer memory) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached) return;
  if (seq == 0) return standing_ready(now, *link, place, std::move(memory));
  const bool refused = memory.empty();
  if (!inbox_.granted(connection, seq, part, place.grant, std::move(memory))) return;
  wire::Grant grant{.seq = seq, .part = part};
  if (!refused) grant = {place.grant, seq, part, place.bytes, place.segment, place.offset};
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

void Session::set_receive_window(Time now, std::uint64_t bytes, std::uint64_t messages) {
  receive_window_ = {bytes, messages};
  ++window_number_;
  if (Link* link = best_link(now)) write_window(*link);
}

void Session::end(const Error& reason, bool send_close) {
  if (send_close) {
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
  return std::ranges::any_of(links_, [](const auto& entry) { return entry.second.attached; });
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
  std::ranges::stable_sort(infos, [](const LinkInfo& a, const LinkInfo& b) {
    return std::pair(a.in_use, a.preference) > std::pair(b.in_use, b.preference);
  });
  return infos;
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
