// The view that a group continues from: after a start of the broker, and when an announcement
// reports another epoch than the broker's own.

#include <algorithm>
#include <limits>
#include <tuple>

#include "group/roster.h"

namespace moolink::group {

void Roster::end_gathering(const Timing& timing) {
  if (!opened_) return;
  const Time end = std::max(timing.gathered_at, *opened_ + config_.coalesce);
  if (timing.now < end) return;
  const Uid* best = nullptr;
  std::tuple<std::uint64_t, bool, Uid> best_key;
  for (const auto& [instance, peer] : peers_) {
    if (peer.last.epoch == 0) continue;
    if (ended(peer.last)) {
      tell(peer, Expel{peer.last.epoch, floor_});
      continue;
    }
    const std::tuple key(peer.last.epoch, peer.last.has_state, peer.last.lineage);
    if (best == nullptr || key > best_key || (key == best_key && !peers_.at(*best).claim)) {
      best = &instance;
      best_key = key;
    }
  }
  if (best == nullptr) {
    found(timing);
  } else if (peers_.at(*best).claim) {
    adopt(timing, *best);
  } else if (Peer& peer = peers_.at(*best); timing.now >= peer.resend_at) {
    peer.resend_at = timing.now + config_.resend_every;
    tell(peer, Resend{});
  }
}

void Roster::found(const Timing& timing) {
  const std::vector<Uid> joined = joiners(timing);
  if (joined.empty()) return;
  formed_ = true;
  opened_.reset();
  make_view(timing, joined, Cause::formed, false);
}

// Takes the claimant's view as the group's. Its members that have not announced themselves yet
// count as silent since gathering began.
void Roster::adopt(const Timing& timing, const Uid& claimant) {
  const Announce witness = peers_.at(claimant).last;
  view_ = *peers_.at(claimant).claim;
  held_ = view_.epoch;
  lineage_began_ = timing.now;
  const Time heard = opened_.value_or(timing.now);
  for (auto& [instance, peer] : peers_) {
    peer.order += view_.members.size();
    if (peer.last.lineage != view_.lineage) continue;
    lineage_began_ = std::min(lineage_began_, peer.lineage_began);
  }
  next_order_ += view_.members.size();
  std::uint64_t order = 0;
  for (const MemberInfo& member : view_.members) {
    const auto [it, missing] = peers_.try_emplace(member.instance);
    Peer& peer = it->second;
    peer.order = order++;
    peer.since = member.since;
    if (!missing) continue;
    peer.unheard = true;
    peer.heard = heard;
    peer.lineage_began = lineage_began_;
    peer.last.self = member;
    peer.last.self.role = member.role == Role::observer ? Role::observer : Role::member;
    peer.last.stateful = witness.stateful;
    peer.last.has_state = member.role == Role::member;
    peer.last.lineage = view_.lineage;
    peer.last.epoch = view_.epoch;
    peer.last.evict_after = witness.evict_after;
  }
  formed_ = true;
  issued_ = false;
  opened_.reset();
  lineage_has_state_ = false;
  say(LogLevel::info, "went on from what its members announce, " + describe(view_));
  for (const auto& [instance, peer] : peers_) put_right(timing, instance);
}

// A peer announced another epoch than the group's own: it is behind, it saw a view of an earlier
// broker, or the group has continued without it.
void Roster::put_right(const Timing& timing, const Uid& instance) {
  Peer& peer = peers_.at(instance);
  const Announce& last = peer.last;
  if (last.epoch == view_.epoch && last.lineage == view_.lineage && in_view(instance)) return;
  const bool ahead = last.epoch > view_.epoch && last.lineage == view_.lineage;
  if (ahead || yields_to(timing, peer)) {
    if (peer.claim) {
      supersede(timing, instance);
    } else if (timing.now >= peer.resend_at) {
      peer.resend_at = timing.now + config_.resend_every;
      tell(peer, Resend{});
    }
  } else if (in_view(instance)) {
    put_right_member(timing, instance, peer);
  } else if (last.epoch != 0) {
    tell(peer, Expel{last.epoch, view_.epoch});
  }
}

void Roster::put_right_member(const Timing& timing, const Uid& instance, Peer& peer) {
  const bool would_refuse = peer.last.floor >= view_.epoch;
  const bool lost_state =
      peer.last.stateful && peer.last.epoch == 0 && view_.find(instance)->role == Role::member;
  if (would_refuse || lost_state) {
    // It saw a higher view, or began anew unknown to the broker: it joins as a newcomer.
    peer.demote = true;
    repair_ = true;
  } else if (timing.now >= peer.resend_at) {
    peer.resend_at = timing.now + config_.resend_every;
    tell(peer, new_epoch(timing));
  }
}

// A view arrived from which this broker should have continued. Members of its own view only stay,
// as newcomers; the next view comes at once and holds both.
void Roster::supersede(const Timing& timing, const Uid& claimant) {
  const View own = view_;
  const bool same_lineage = own.lineage == peers_.at(claimant).last.lineage;
  if (!same_lineage) ended_[own.lineage] = std::numeric_limits<std::uint64_t>::max();
  adopt(timing, claimant);
  for (const MemberInfo& member : own.members) {
    if (in_view(member.instance)) continue;
    // Its namesake in the older view is its predecessor.
    if (const MemberInfo* namesake = view_.find(member.name)) {
      if (Peer& old = peers_.at(namesake->instance); old.unheard) old.gone = Cause::died;
    }
    peers_.at(member.instance).demote = true;
    view_.members.push_back(member);
  }
  repair_ = true;
}

bool Roster::ended(const Announce& announce) const {
  const auto it = ended_.find(announce.lineage);
  return it != ended_.end() && announce.epoch < it->second;
}

// A broker that starts anew may found a lineage before it hears of an older one, whose state is
// worth more. The next broker, which continues from the young lineage, may be the first to hear of
// the older one. A newcomer may be the first to report it; its view then names the holders of the
// state.
bool Roster::yields_to(const Timing& timing, const Peer& peer) const {
  const Announce& last = peer.last;
  if (timing.now - lineage_began_ >= config_.lineage_settle) return false;
  if (last.epoch == 0 || last.lineage == view_.lineage || ended(last)) return false;
  if (peer.lineage_began >= lineage_began_) return false;
  return last.has_state || !peer.claim ||
         std::ranges::any_of(peer.claim->members,
                             [](const MemberInfo& member) { return member.role == Role::member; });
}

}  // namespace moolink::group
