// Standing grants: the receiver grants memory in advance, so that a large part is captured straight
// into it, and its message needs no answer. See docs/design/protocol/session.md, "Standing grants".

#include <algorithm>
#include <bit>
#include <utility>

#include "base/mutant.h"
#include "session/session.h"

namespace moolink::session {

namespace {

// Per connection: the grants that its sender can make this side hold without a message.
constexpr std::size_t kStandingGrants = 8;
constexpr std::size_t kStandingBytes = std::size_t{256} << 20;
// How many grants of an honest peer this side keeps.
constexpr std::size_t kMostStanding = 64;

}  // namespace

// ---- the receiver ----

// After a part of `bytes` has arrived in a grant, more of its kind are likely.
void Session::offer_standing(const Link& link, std::uint64_t bytes) {
  if (bytes < kInlineBytes || !link.traits.standing_grants) return;
  const std::uint64_t size = std::bit_ceil(bytes);
  const Inbox::Standing standing = inbox_.standing(link.connection);
  if (standing.grants >= kStandingGrants || size > kStandingBytes - standing.bytes) return;
  actions_.push_back(AllocateGrant{link.connection, 0, 0, size});
}

// As many as the last message used.
void Session::offer_standing_again(const Link& link) {
  for (const std::uint64_t bytes : inbox_.take_placed()) offer_standing(link, bytes);
}

void Session::standing_ready(Time, Link& link, const wire::GrantPlace& place,
                             MutableBuffer memory) {
  if (memory.empty()) return;
  inbox_.stand(link.connection, place.grant, std::move(memory));
  write(link, wire::make_frame(wire::FrameType::grant, wire::Grant{place.grant, 0, 0, place.bytes,
                                                                   place.segment, place.offset}));
}

// ---- the sender ----

void Session::received_standing(Time now, Link& link, const wire::Grant& grant) {
  if (grant.grant == 0 || link.standing.size() >= kMostStanding) {
    wire::fail("a standing grant without memory, or too many of them");
  }
  link.standing.push_back({{grant.grant, grant.segment, grant.offset, grant.bytes}, now});
}

// The smallest that is large enough; of equal ones the latest, whose memory is warm. The others are
// returned in time.
std::optional<Session::StandingPlace> Session::take_standing(Time now, std::uint64_t bytes) {
  Link* link = ready_ ? best_link(now) : nullptr;
  if (link == nullptr || bytes == 0) return std::nullopt;
  auto best = link->standing.end();
  for (auto at = link->standing.begin(); at != link->standing.end(); ++at) {
    if (at->place.bytes < bytes || at->place.bytes / kRoomiestGrant > bytes) continue;
    if (best == link->standing.end() || at->place.bytes <= best->place.bytes) best = at;
  }
  if (best == link->standing.end()) return std::nullopt;
  const StandingPlace taken{link->connection, best->place};
  if (!mutant("standing_grant_taken_twice")) link->standing.erase(best);
  return taken;
}

void Session::release_standing(Time /*now*/, ConnectionId connection, std::uint64_t grant) {
  Link* link = find(connection);
  if (link == nullptr || !link->attached || mutant("keep_unused_standing")) return;
  write(*link, wire::make_frame(wire::FrameType::done, wire::Done{grant}));
}

// Parts placed in grants of this connection have arrived already.
void Session::place_parts(const Link& link, Outgoing& outgoing, wire::MessageHead& head) {
  for (const wire::PlacedPart& placed : outgoing.message.payload.placed) {
    wire::StandingGrant& standing = *placed.standing;
    LargePart* large = outgoing.find_large(placed.part);
    const bool here = !standing.named && standing.connection == link.connection;
    if (large == nullptr || (!here && !mutant("placed_in_every_attempt"))) continue;
    standing.named = true;
    head.parts[placed.part].where = wire::PartWhere::placed;
    head.parts[placed.part].id = standing.grant;
    large->state = LargePart::State::sent;
  }
}

void Session::return_idle_standing(Time now) {
  for (auto& [connection, link] : links_) {
    std::vector<std::uint64_t> idle;
    std::erase_if(link.standing, [&](const Link::Standing& standing) {
      if (now - standing.since < config_.timing.standing_for) return false;
      idle.push_back(standing.place.grant);
      return true;
    });
    for (const std::uint64_t grant : idle) release_standing(now, connection, grant);
  }
}

Time Session::standing_deadline() const {
  Time deadline = kNever;
  for (const auto& [connection, link] : links_) {
    if (link.standing.empty()) continue;
    deadline = std::min(deadline, link.standing.front().since + config_.timing.standing_for);
  }
  return deadline;
}

}  // namespace moolink::session
