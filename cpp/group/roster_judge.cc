// Which members of a group are gone, and which peers may join.

#include <algorithm>
#include <tuple>
#include <utility>

#include "group/roster.h"

namespace moolink::group {

bool Roster::reachable(const Timing& timing, const Peer& peer) const {
  const Duration limit = std::max(peer.last.evict_after, config_.suspect_after);
  return !peer.gone && timing.now - peer.heard < limit;
}

// In a group without state every participant can continue it.
bool Roster::holds_state(const Peer& peer) const {
  const Announce& last = peer.last;
  if (last.self.role == Role::observer) return false;
  if (!last.stateful) return true;
  return last.has_state && !peer.demote && last.epoch != 0 && last.lineage == view_.lineage &&
         last.epoch >= peer.since;
}

Roster::Heard Roster::heard(const Timing& timing) const {
  Heard heard;
  for (const MemberInfo& member : view_.members) {
    const Peer& peer = peers_.at(member.instance);
    const bool reachable = this->reachable(timing, peer);
    heard.holders += reachable && holds_state(peer) ? 1 : 0;
    if (!reporting(reachable, member)) continue;
    ++heard.reporting;
    for (const Suspicion& suspicion : peer.last.suspected) {
      if (!peers_.contains(suspicion.instance)) continue;
      Reports& reports = heard.reports[suspicion.instance];
      if (reports.count++ == 0) reports.first = &peer;
      reports.dead += suspicion.dead ? 1 : 0;
    }
  }
  return heard;
}

bool Roster::reporting(bool reachable, const MemberInfo& member) {
  return member.role != Role::observer && reachable;
}

bool Roster::last_holder(const Timing& timing, const Heard& heard, const Peer& peer) const {
  const bool counted = holds_state(peer) && reachable(timing, peer);
  return may_hold_state(peer) && heard.holders == (counted ? 1 : 0);
}

void Roster::evict(const Timing& timing, Heard& heard, const MemberInfo& member, Cause cause) {
  Peer& peer = peers_.at(member.instance);
  const bool was_reachable = reachable(timing, peer);
  peer.gone = cause;
  if (was_reachable && holds_state(peer)) --heard.holders;
  if (!reporting(was_reachable, member) || reporting(false, member)) return;
  --heard.reporting;
  for (const Suspicion& suspicion : peer.last.suspected) {
    const auto it = heard.reports.find(suspicion.instance);
    if (it == heard.reports.end()) continue;
    --it->second.count;
    it->second.dead -= suspicion.dead ? 1 : 0;
  }
}

// Two members of the view have lost a session, and with it messages of this epoch.
void Roster::find_gaps() {
  for (const MemberInfo& member : view_.members) {
    const Announce& last = peers_.at(member.instance).last;
    if (last.epoch != view_.epoch || last.lineage != view_.lineage) continue;
    repair_ = repair_ ||
              std::ranges::any_of(last.gaps, [this](const Uid& other) { return in_view(other); });
  }
}

// A peer that joins under the name of one that does not answer any more is its successor.
void Roster::find_replaced(const Timing& timing) {
  if (!timing.armed) return;
  for (const auto& [instance, joiner] : peers_) {
    if (joiner.last.epoch != 0 || joiner.gone || in_view(instance)) continue;
    for (auto& [other, peer] : peers_) {
      if (other == instance || peer.last.self.name != joiner.last.self.name) continue;
      if (timing.now - peer.heard >= config_.suspect_after && joiner.heard > peer.heard) {
        peer.gone = Cause::died;
      }
    }
  }
}

// When no peer at all is heard, this broker is probably cut off. The last holders of the state get
// more time: without them the group would begin from nothing.
void Roster::find_silent(const Timing& timing, const Heard& heard) {
  const Duration unheard = timing.now - last_event_;
  const bool cut_off = unheard >= config_.suspect_after && unheard < config_.abandon_after;
  if (cut_off) return;
  for (const MemberInfo& member : view_.members) {
    Peer& peer = peers_.at(member.instance);
    if (peer.gone || reachable(timing, peer)) continue;
    const bool spared =
        last_holder(timing, heard, peer) && timing.now - peer.heard < config_.abandon_after;
    if (!spared) peer.gone = Cause::silent;
  }
}

// One proof of death suffices. For silence, half of the others must suspect the member. Silent
// members do not count.
bool Roster::condemned(const Heard& heard, const Reports& reports, bool is_reporting) {
  const std::size_t others = heard.reporting - (is_reporting ? 1 : 0);
  return reports.dead > 0 || (reports.count > 0 && 2 * reports.count >= others);
}

// The suspected member whose eviction explains most suspicions: of two members that suspect each
// other only one is evicted, not merely the one reported first. A proven death comes first and a
// holder of the state last; then the number of reporters and the higher rank decide.
const Roster::Suspect* Roster::worst_of(const Timing& timing, const Heard& heard,
                                        const std::vector<Suspect>& suspects) const {
  const Suspect* worst = nullptr;
  std::tuple<bool, bool, std::size_t> worst_key;
  bool due = false;
  for (const Suspect& suspect : suspects) {
    const auto& [member, peer, reports] = suspect;
    if (peer->gone) continue;
    if (!condemned(heard, *reports, reporting(reachable(timing, *peer), *member))) {
      peer->suspected_at.reset();
      continue;
    }
    if (!peer->suspected_at) peer->suspected_at = timing.now;
    const bool dead = reports->dead > 0;
    if (!dead && last_holder(timing, heard, *peer)) continue;
    due = due || dead || timing.now - *peer->suspected_at >= config_.suspected_for;
    const std::tuple key(dead, !holds_state(*peer), reports->count);
    if (worst == nullptr || key >= worst_key) {
      worst = &suspect;
      worst_key = key;
    }
  }
  return due ? worst : nullptr;
}

void Roster::find_suspected(const Timing& timing, Heard& heard) {
  std::vector<Suspect> suspects;
  for (const MemberInfo& member : view_.members) {
    Peer& peer = peers_.at(member.instance);
    if (!peer.suspected_at && !heard.reports.contains(member.instance)) continue;
    suspects.push_back({&member, &peer, &heard.reports[member.instance]});
  }
  while (const Suspect* worst = worst_of(timing, heard, suspects)) {
    evict(timing, heard, *worst->member, worst->reports->dead > 0 ? Cause::died : Cause::silent);
  }
}

// The last holder keeps its state, because no other member could give it one; the leader that asked
// may have died since. But a new epoch begins: the leader waits for something that, in this one,
// may never come.
void Roster::find_demoted(const Timing& timing, Heard& heard) {
  for (const MemberInfo& member : view_.members) {
    Peer& peer = peers_.at(member.instance);
    if (!std::exchange(peer.demotion_asked, false) || peer.gone) continue;
    if (last_holder(timing, heard, peer)) {
      repair_ = true;
      continue;
    }
    if (holds_state(peer) && reachable(timing, peer)) --heard.holders;
    peer.demote = true;
  }
}

std::vector<Uid> Roster::joiners(const Timing& timing) {
  const Heard heard = this->heard(timing);
  std::vector<Uid> joined;
  for (auto& [instance, peer] : peers_) {
    if (peer.last.epoch != 0 || peer.gone || in_view(instance)) continue;
    if (admissible(timing, heard, instance, peer)) joined.push_back(instance);
  }
  return joined;
}

bool Roster::admissible(const Timing& timing, const Heard& heard, const Uid& instance, Peer& peer) {
  const std::string& name = peer.last.self.name;
  for (const auto& [other, holder] : peers_) {
    if (other == instance || holder.gone || holder.last.self.name != name) continue;
    if (!in_view(other) && holder.order > peer.order) continue;
    refuse(timing, peer,
           "the name '" + name + "' is taken by a peer that answers; give each peer its own name");
    return false;
  }
  for (const Suspicion& suspicion : peer.last.suspected) {
    const MemberInfo* member = view_.find(suspicion.instance);
    if (member == nullptr || member->role == Role::observer) continue;
    if (peers_.at(suspicion.instance).gone) continue;  // this view leaves it out
    refuse(timing, peer, "this peer cannot reach member '" + member->name + "'");
    return false;
  }
  const auto reports = heard.reports.find(instance);
  if (reports == heard.reports.end() || !condemned(heard, reports->second, false)) return true;
  refuse(timing, peer,
         "peer '" + reports->second.first->last.self.name +
             "' cannot reach this peer (suspected by " + std::to_string(reports->second.count) +
             " of " + std::to_string(view_.participants()) + " members)");
  return false;
}

void Roster::refuse(const Timing& timing, Peer& peer, std::string reason) {
  if (timing.now < peer.refuse_at) return;
  peer.refuse_at = timing.now + config_.suspect_after;
  tell(peer, Refused{std::move(reason)});
}

}  // namespace moolink::group
