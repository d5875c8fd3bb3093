#include "group/roster.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "wire/hostile_messages.h"

namespace moolink::group {

Roster::Roster(std::string group, const BrokerConfig& config, Random& random,
               std::vector<BrokerAction>& actions)
    : group_(std::move(group)), config_(config), random_(random), actions_(actions) {}

// ---- events

void Roster::announced(const Timing& timing, const Uid& from, Announce announce) {
  if (announce.self.instance != from) return;  // no peer speaks for another
  if (const auto it = peers_.find(from); it != peers_.end() && it->second.gone) {
    decide(timing);  // it comes back: first remove it
  }
  // A peer's suspicion of another counts once. Its suspicion of itself does not count.
  std::set<Uid> suspected{from};
  std::erase_if(announce.suspected, [&](const Suspicion& suspicion) {
    return !suspected.insert(suspicion.instance).second;
  });
  hear_again(timing);
  floor_ = std::max({floor_, announce.floor, announce.epoch});
  const auto [it, first] = peers_.try_emplace(from);
  Peer& peer = it->second;
  if (first) peer.order = next_order_++;
  const bool new_facts = first || changed(peer.last, announce);
  if (announce.view) {
    peer.claim = std::exchange(announce.view, std::nullopt);
    if (peer.claim->has_duplicates() || peer.claim->find(from) == nullptr) peer.claim.reset();
  }
  // The group would go on from a claim as if it were the view announced.
  if (peer.claim &&
      (peer.claim->epoch != announce.epoch || peer.claim->lineage != announce.lineage))
    peer.claim.reset();
  peer.last = std::move(announce);
  peer.lineage_began = began(timing.now, peer.last.lineage_age);
  peer.heard = timing.now;
  peer.unheard = peer.excused = false;
  if (!formed_ && !opened_) opened_ = timing.now;
  if (formed_) {
    if (peer.last.lineage == view_.lineage) held_ = std::max(held_, peer.last.epoch);
    put_right(timing, from);
  }
  news_ = news_ || new_facts || repair_;
}

// A broker that heard no peer was cut off itself: silence counts anew from then on. For a peer that
// stays silent between two such times only those times do not count; else it would never be
// removed.
void Roster::hear_again(const Timing& timing) {
  const Duration unheard = timing.now - std::exchange(last_event_, timing.now);
  if (!formed_ || unheard < config_.suspect_after) return;
  for (const MemberInfo& member : view_.members) {
    Peer& peer = peers_.at(member.instance);
    const bool again = std::exchange(peer.excused, true);
    peer.heard = again ? peer.heard + unheard : timing.now;
  }
}

bool Roster::changed(const Announce& before, const Announce& after) const {
  return before.self != after.self || before.stateful != after.stateful ||
         before.has_state != after.has_state || before.lineage != after.lineage ||
         before.epoch != after.epoch || before.floor != after.floor ||
         before.suspected != after.suspected || before.gaps != after.gaps;
}

void Roster::lost(const Uid& instance, Cause cause) {
  const auto it = peers_.find(instance);
  if (it == peers_.end()) return;
  it->second.gone = cause;
  news_ = true;
}

void Roster::demotion_asked(const Uid& from, const Demote& demote) {
  if (!formed_ || demote.epoch != view_.epoch || !in_view(from) || !in_view(demote.instance)) {
    return;
  }
  peers_.at(demote.instance).demotion_asked = true;
  news_ = true;
}

// ---- decisions

void Roster::decide(const Timing& timing) {
  news_ = false;
  forget_silent_outsiders(timing);
  if (!formed_) end_gathering(timing);
  if (!formed_) return;
  lineage_has_state_ =
      lineage_has_state_ || std::ranges::any_of(view_.members, [this](const MemberInfo& member) {
        return holds_state(peers_.at(member.instance));
      });
  find_gaps();
  find_replaced(timing);
  Heard heard = this->heard(timing);
  if (timing.armed) find_silent(timing, heard);
  find_suspected(timing, heard);
  find_demoted(timing, heard);
  const auto hard = hard_cause();
  if (!hard && timing.now < soft_at_) return;
  const std::vector<Uid> joined = joiners(timing);
  if (hard) {
    make_view(timing, joined, *hard, false);
  } else if (!joined.empty()) {
    make_view(timing, joined, Cause::joined, true);
  } else if (order_changed()) {
    make_view(timing, joined, Cause::ordered, true);
  }
}

// Peers outside the view that left, or are not heard any more, need no decision.
void Roster::forget_silent_outsiders(const Timing& timing) {
  std::erase_if(peers_, [&](const auto& item) {
    const Peer& peer = item.second;
    return (peer.gone || (timing.armed && !reachable(timing, peer))) && !in_view(item.first);
  });
}

std::optional<Cause> Roster::hard_cause() const {
  std::optional<Cause> cause;
  const auto add = [&](Cause reason) { cause = std::min(cause.value_or(reason), reason); };
  for (const MemberInfo& member : view_.members) {
    const Peer& peer = peers_.at(member.instance);
    if (peer.gone) add(*peer.gone);
    if (peer.demote) add(Cause::demoted);
  }
  if (repair_) add(Cause::repaired);
  return cause;
}

bool Roster::order_changed() const {
  return std::ranges::any_of(view_.members, [this](const MemberInfo& member) {
    const MemberInfo& now = peers_.at(member.instance).last.self;
    return now.sort != member.sort ||
           (now.role == Role::observer) != (member.role == Role::observer);
  });
}

Role Roster::role_of(const Peer& peer) const {
  if (peer.last.self.role == Role::observer) return Role::observer;
  return holds_state(peer) ? Role::member : Role::newcomer;
}

// A broker that continues from a view it did not make cannot know whether its predecessor made a
// later one that no announcement has reported yet. A random stride keeps their numbers apart.
std::uint64_t Roster::next_epoch() {
  constexpr std::uint64_t kLeast = std::uint64_t{1} << 12;
  constexpr std::uint64_t kSpread = std::uint64_t{1} << 20;
  const bool inherited = !issued_ && floor_ > 0;
  issued_ = true;
  return floor_ += inherited ? kLeast + random_.below(kSpread) : 1;
}

void Roster::make_view(const Timing& timing, const std::vector<Uid>& joined, Cause cause,
                       bool soft) {
  const std::vector<MemberInfo> evicted = take_out_gone();
  std::vector<Uid> next = joined;
  for (const MemberInfo& member : view_.members) next.push_back(member.instance);
  if (next.empty()) {
    dissolve(timing);
    return;
  }
  view_.epoch = next_epoch();
  view_.cause = cause;
  view_.soft = soft;
  view_.members.clear();
  for (const Uid& instance : joined) peers_.at(instance).since = view_.epoch;
  for (const Uid& instance : next) {
    Peer& peer = peers_.at(instance);
    if (peer.demote) peer.since = view_.epoch;
    peer.demote = false;
    view_.members.push_back(peer.last.self);
  }
  if (renew_lineage(timing)) {
    view_.cause = Cause::formed;
    view_.soft = false;
  }
  for (MemberInfo& member : view_.members) {
    const Peer& peer = peers_.at(member.instance);
    member.role = role_of(peer);
    member.since = peer.since;
  }
  std::ranges::sort(view_.members, {}, [this](const MemberInfo& member) {
    return std::tuple(member.role == Role::observer, member.sort, peers_.at(member.instance).order);
  });
  repair_ = false;
  soft_at_ = timing.now + config_.coalesce;
  publish(timing, evicted);
}

// Returns the removed members that may still live.
std::vector<MemberInfo> Roster::take_out_gone() {
  std::vector<MemberInfo> evicted;
  std::erase_if(view_.members, [&](const MemberInfo& member) {
    const auto it = peers_.find(member.instance);
    if (!it->second.gone) return false;
    if (*it->second.gone != Cause::left) evicted.push_back(member);
    peers_.erase(it);
    return true;
  });
  return evicted;
}

// No member is left. Members that were only silent are not told, and bring the view with them if
// they return before a new lineage is founded. Views before the newest one that a member is known
// to hold do not come back; later ones may have reached no member.
void Roster::dissolve(const Timing& timing) {
  say(LogLevel::info, "membership " + std::to_string(view_.epoch) + " has lost all its members");
  ended_[view_.lineage] = held_;
  view_ = {};
  formed_ = false;
  issued_ = false;
  repair_ = false;
  opened_.reset();
  if (!peers_.empty()) opened_ = timing.now;
}

// Whether no holder of the state is left: then the remaining members begin a new lineage.
bool Roster::renew_lineage(const Timing& timing) {
  const bool held = std::ranges::any_of(view_.members, [this](const MemberInfo& member) {
    return may_hold_state(peers_.at(member.instance));
  });
  const bool over = lineage_has_state_ && !held;
  if (view_.lineage && !over) return false;
  if (view_.lineage) ended_[view_.lineage] = std::numeric_limits<std::uint64_t>::max();
  view_.lineage = Uid::random(random_);
  held_ = 0;
  lineage_has_state_ = false;
  lineage_began_ = timing.now;
  for (const MemberInfo& member : view_.members) {
    peers_.at(member.instance).since = view_.epoch;
  }
  return true;
}

void Roster::publish(const Timing& timing, const std::vector<MemberInfo>& evicted) {
  say(LogLevel::info, describe(view_));
  NewEpoch made = new_epoch(timing);
  wire::lie("view.epoch", made.view.epoch);
  std::size_t twins = 0;  // of the first member, in place of all
  wire::lie("view.twins", twins);
  if (twins > 0) made.view.members.assign(twins, MemberInfo(made.view.members.front()));
  const Buffer bytes = wire::encode(Message{group_, std::move(made)});
  for (const MemberInfo& member : view_.members) {
    peers_.at(member.instance).resend_at = timing.now + config_.resend_every;
    send(member.instance, member.name, bytes);
  }
  for (const MemberInfo& member : evicted) send(member.instance, member.name, bytes);
}

}  // namespace moolink::group
