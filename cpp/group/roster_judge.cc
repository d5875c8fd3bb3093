// Which members of a group are gone, and which peers may join.

#include <algorithm>
#include <tuple>

#include "base/mutant.h"
#include "group/roster.h"

namespace moolink::group {

bool Roster::reachable(const Timing& timing, const Peer& peer) const {
  const Duration limit = std::max(peer.last.evict_after, config_.suspect_after);
  return !peer.gone &&
         timing.now - peer.heard < (mutant("evict_frozen_early") ? milliseconds(800) : limit);
}

// In a group without state every participant can continue it.
bool Roster::holds_state(const Peer& peer) const {
  const Announce& last = peer.last;
  if (last.self.role == Role::observer) return false;
  if (!last.stateful) return true;
  return last.has_state && !peer.demote && last.epoch != 0 && last.lineage == view_.lineage &&
         last.epoch >= peer.since;
}

bool Roster::last_holder(const Timing& timing, const Uid& instance) const {
  if (mutant("evict_last_holder")) return false;
  if (!may_hold_state(peers_.at(instance))) return false;
  return std::ranges::none_of(view_.members, [&](const MemberInfo& member) {
    const Peer& peer = peers_.at(member.instance);
    return member.instance != instance && holds_state(peer) && reachable(timing, peer);
  });
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
void Roster::find_silent(const Timing& timing) {
  const Duration unheard = timing.now - last_event_;
  const bool cut_off = unheard >= config_.suspect_after && unheard < config_.abandon_after;
  if (cut_off && !mutant("blame_others_for_own_silence")) return;
  for (const MemberInfo& member : view_.members) {
    Peer& peer = peers_.at(member.instance);
    if (peer.gone || reachable(timing, peer)) continue;
    const bool spared =
        last_holder(timing, member.instance) && timing.now - peer.heard < config_.abandon_after;
    if (!spared) peer.gone = Cause::silent;
  }
}

// The members that suspect `instance`, if they suffice: one with a proof of death, or half of the
// others for silence. Otherwise none. Silent members do not count.
std::vector<const Roster::Peer*> Roster::condemning(const Timing& timing, const Uid& instance,
                                                    bool* dead) const {
  std::vector<const Peer*> reporters;
  std::size_t others = 0;
  *dead = false;
  for (const MemberInfo& member : view_.members) {
    const Peer& peer = peers_.at(member.instance);
    if (member.instance == instance || member.role == Role::observer) continue;
    if (!reachable(timing, peer) && !mutant("evict_both_reporters")) continue;
    ++others;
    const auto it = std::ranges::find(peer.last.suspected, instance, &Suspicion::instance);
    if (it == peer.last.suspected.end()) continue;
    *dead = *dead || it->dead;
    reporters.push_back(&peer);
  }
  if (!*dead && 2 * reporters.size() < others) reporters.clear();
  return reporters;
}

// The suspected member whose eviction explains most suspicions: of two members that suspect each
// other only one is evicted, not merely the one reported first. A proven death comes first and a
// holder of the state last; then the number of reporters and the higher rank decide.
std::optional<Uid> Roster::worst_suspected(const Timing& timing) {
  std::optional<Uid> worst;
  std::tuple<bool, bool, std::size_t> worst_key;
  bool due = false;
  const std::set<Uid> suspected = suspected_members();
  for (const MemberInfo& member : view_.members) {
    Peer& peer = peers_.at(member.instance);
    if (peer.gone || (!suspected.contains(member.instance) && !peer.suspected_at)) continue;
    bool dead = false;
    const auto reporters = condemning(timing, member.instance, &dead);
    if (reporters.empty()) {
      peer.suspected_at.reset();
      continue;
    }
    if (!peer.suspected_at) peer.suspected_at = timing.now;
    if (!dead && last_holder(timing, member.instance)) continue;
    due = due || dead || timing.now - *peer.suspected_at >= config_.suspected_for;
    const std::tuple key(dead, !holds_state(peer), reporters.size());
    if (!worst || key >= worst_key) {
      worst = member.instance;
      worst_key = key;
    }
  }
  return due ? worst : std::nullopt;
}

std::set<Uid> Roster::suspected_members() const {
  std::set<Uid> suspected;
  for (const MemberInfo& member : view_.members) {
    for (const Suspicion& suspicion : peers_.at(member.instance).last.suspected) {
      if (in_view(suspicion.instance)) suspected.insert(suspicion.instance);
    }
  }
  return suspected;
}

void Roster::find_suspected(const Timing& timing) {
  while (const auto worst = worst_suspected(timing)) {
    bool dead = false;
    condemning(timing, *worst, &dead);
    peers_.at(*worst).gone = dead ? Cause::died : Cause::silent;
  }
}

std::vector<Uid> Roster::joiners(const Timing& timing) {
  std::vector<Uid> joined;
  for (auto& [instance, peer] : peers_) {
    if (peer.last.epoch != 0 || peer.gone || in_view(instance)) continue;
    if (admissible(timing, instance, peer)) joined.push_back(instance);
  }
  return joined;
}

bool Roster::admissible(const Timing& timing, const Uid& instance, Peer& peer) {
  const std::string& name = peer.last.self.name;
  for (const auto& [other, holder] : peers_) {
    if (other == instance || holder.gone || holder.last.self.name != name) continue;
    if (!in_view(other) && holder.order > peer.order) continue;
    refuse(timing, instance, peer,
           "the name '" + name + "' is taken by a peer that answers; give each peer its own name");
    return false;
  }
  for (const Suspicion& suspicion : peer.last.suspected) {
    const MemberInfo* member = view_.find(suspicion.instance);
    if (member == nullptr || member->role == Role::observer) continue;
    if (peers_.at(suspicion.instance).gone) continue;  // this view leaves it out
    refuse(timing, instance, peer, "this peer cannot reach member '" + member->name + "'");
    return false;
  }
  bool dead = false;
  const auto reporters = condemning(timing, instance, &dead);
  if (reporters.empty()) return true;
  refuse(timing, instance, peer,
         "peer '" + reporters.front()->last.self.name + "' cannot reach this peer (suspected by " +
             std::to_string(reporters.size()) + " of " + std::to_string(view_.participants()) +
             " members)");
  return false;
}

void Roster::refuse(const Timing& timing, const Uid& instance, Peer& peer, std::string reason) {
  if (timing.now < peer.refuse_at) return;
  peer.refuse_at = timing.now + config_.suspect_after;
  send(instance, peer.last.self.name, wire::encode(Message{group_, Refused{std::move(reason)}}));
}

}  // namespace moolink::group
