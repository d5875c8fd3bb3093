#include "group/member.h"

#include <algorithm>
#include <utility>

#include "wire/hostile_messages.h"

namespace moolink::group {

Member::Member(MemberConfig config, Time now)
    : config_(std::move(config)),
      next_announce_(now),
      next_tick_(now + config_.announce_every),
      armed_at_(now) {}

// Every event passes here first: a machine that was not run in time (a stopped process, a starved
// reactor) cannot tell its own silence from that of others.
void Member::notice(Time now) {
  if (now > next_tick_ + config_.late) armed_at_ = std::max(armed_at_, now + config_.disarmed);
  next_tick_ = std::max(next_tick_, now);
}

Time Member::next_deadline() const {
  if (left_) return kNever;
  return broker_.empty() ? next_tick_ : std::min(next_tick_, next_announce_);
}

void Member::tick(Time now) {
  notice(now);
  if (now >= next_tick_) next_tick_ = now + config_.announce_every;
  if (left_) return;
  forget_old_suspicions(now);
  probe(now);
  if (now >= armed_at_ && !armed_) announce_soon(now);
  if (now >= next_announce_) announce(now);
}

void Member::broker_up(Time now, const Uid& instance) {
  notice(now);
  if (left_) return;
  broker_ = instance;
  send_view_ = true;
  // A member without its broker may have been cut off itself; it tries all members again before it
  // calls any of them silent.
  armed_at_ = std::max(armed_at_, now + config_.evict_after);
  for (auto& [other, unreachable] : unreachable_) unreachable.probe_at = now;
  probe(now);
  announce(now);
}

void Member::broker_down(Time now) {
  notice(now);
  if (left_ || broker_.empty()) return;
  broker_ = {};
  refusal_.clear();
}

void Member::peer_up(Time now, const Uid& instance) {
  notice(now);
  if (unreachable_.erase(instance) != 0) announce_soon(now);
}

void Member::peer_down(Time now, const Uid& instance, Down how) {
  notice(now);
  if (left_ || instance == config_.self.instance) return;
  // A dead peer stays dead, whatever is heard later.
  const auto [suspected, first] = unreachable_.try_emplace(instance);
  suspected->second.dead = suspected->second.dead || how != Down::unreachable;
  suspected->second.since = now;
  if (first) suspected->second.probe_at = now + config_.probe_every;
  announce_soon(now);
  const MemberInfo* member = view_->find(instance);
  if (member == nullptr) return;
  lost_.insert(instance);
  if (first && broker_.empty()) {
    say(LogLevel::warning,
        "peer '" + member->name + "' was lost while the broker is away; the group waits for it");
  }
}

// ---- announcements

bool Member::suspects(Time now, const Unreachable& unreachable) const {
  return unreachable.dead || now >= armed_at_;
}

std::vector<Suspicion> Member::suspected(Time now) const {
  std::vector<Suspicion> suspected;
  for (const auto& [instance, unreachable] : unreachable_) {
    if (suspects(now, unreachable)) suspected.push_back({instance, unreachable.dead});
  }
  return suspected;
}

// A lost session loses messages of its epoch, and no peer asks for them again: the two continue in
// another epoch, which begins with what each has.
std::vector<Uid> Member::gaps() const {
  std::vector<Uid> gaps;
  for (const Uid& instance : lost_) {
    if (!unreachable_.contains(instance)) gaps.push_back(instance);
  }
  return gaps;
}

// The broker admits no peer that the members suspect. A member may never again try the path to a
// peer outside the view, so such a suspicion lapses.
void Member::forget_old_suspicions(Time now) {
  const auto lapsed = std::erase_if(unreachable_, [&](const auto& item) {
    return view_->find(item.first) == nullptr &&
           now - item.second.since >= config_.suspicion_memory;
  });
  if (lapsed != 0) announce_soon(now);
}

// Without messages to a member, its return would go unnoticed.
void Member::probe(Time now) {
  for (auto& [instance, unreachable] : unreachable_) {
    const MemberInfo* member = view_->find(instance);
    if (member == nullptr || unreachable.dead || now < unreachable.probe_at) continue;
    unreachable.probe_at = now + config_.probe_every;
    actions_.push_back(
        SendToMember{instance, member->name, wire::encode(Message{config_.group, Probe{}})});
  }
}

void Member::announce(Time now) {
  armed_ = now >= armed_at_;
  next_announce_ = now + config_.announce_every;
  if (broker_.empty()) return;
  Announce message;
  message.self = config_.self;
  message.stateful = config_.stateful;
  message.has_state = !config_.stateful || has_state_;
  message.lineage = view_->lineage;
  if (!view_->empty()) message.lineage_age = now - lineage_began_;
  message.epoch = view_->epoch;
  message.floor = floor_;
  message.evict_after = config_.evict_after;
  message.suspected = suspected(now);
  message.gaps = gaps();
  if (send_view_ && !view_->empty()) message.view = *view_;
  send_view_ = false;
  wire::lie("announce.epoch", message.epoch);
  wire::lie("announce.floor", message.floor);
  if (message.view) wire::lie("announce.view", message.view->epoch);
  actions_.push_back(SendToBroker{wire::encode(Message{config_.group, std::move(message)})});
}

// ---- views

void Member::received(Time now, const Uid& from, std::span<const std::byte> bytes) {
  notice(now);
  const auto message = wire::decode<Message>(bytes);
  if (left_ || message.group != config_.group) return;
  if (const auto* stale = std::get_if<Stale>(&message.body)) {
    return on_view(now, from, *stale);
  }
  if (const auto* made = std::get_if<NewEpoch>(&message.body)) {
    return on_view(now, from, *made);
  }
  if (from != broker_) return;  // a broker that this peer gave up
  if (const auto* expel = std::get_if<Expel>(&message.body)) {
    if (expel->epoch == view_->epoch && !view_->empty()) {
      floor_ = std::max(floor_, expel->floor);
      evicted(now, "the group goes on without this peer");
    }
  } else if (const auto* refused = std::get_if<Refused>(&message.body)) {
    if (view_->empty() && refusal_ != refused->reason) {
      refusal_ = refused->reason;
      say(LogLevel::warning, "not let in yet: " + refusal_);
    }
  } else if (std::holds_alternative<Resend>(message.body)) {
    send_view_ = true;
    announce_soon(now);
  }
}

// Far more than brokers raise epochs by (Roster::next_epoch).
constexpr std::uint64_t kMostRaised = std::uint64_t{1} << 32;

// A view counts the same whichever peer relays it: only a broker makes one, and its number decides.
// But a member that forges one must not raise the floor permanently.
bool Member::believes(const Uid& from, const View& view) const {
  if (from == broker_) return true;
  return !view_->empty() && view.epoch - std::min(view.epoch, floor_) <= kMostRaised;
}

void Member::on_view(Time now, const Uid& from, const NewEpoch& made) {
  const View& view = made.view;
  if (view.epoch <= floor_) return;
  if (!believes(from, view)) return;
  if (view.has_duplicates()) return;  // no broker makes such a view
  const MemberInfo* self = view.find(config_.self.instance);
  floor_ = view.epoch;
  if (self == nullptr) {
    if (!view_->empty()) evicted(now, describe(view) + " is without this peer");
    return;
  }
  const bool same_lineage = view.lineage == view_->lineage;
  if (!same_lineage || (self->role == Role::newcomer && self->since > state_epoch_)) {
    has_state_ = false;
  }
  const Time told = began(now, made.lineage_age);
  lineage_began_ = same_lineage ? std::min(lineage_began_, told) : told;
  view_ = std::make_shared<const View>(view);
  // Messages in the new epoch to a member that is not reached yet may be lost, too.
  std::erase_if(lost_, [this](const Uid& instance) {
    return !unreachable_.contains(instance) || view_->find(instance) == nullptr;
  });
  refusal_.clear();
  const bool held = view.soft && hold_;
  if (!held) active_ = view_;
  std::erase_if(stale_sent_, [&](const auto& item) { return view_->find(item.first) == nullptr; });
  actions_.push_back(NewView{view_, !held});
  announce_soon(now);
}

void Member::evicted(Time now, std::string_view why) {
  const std::uint64_t epoch = view_->epoch;
  view_ = no_view();
  active_ = no_view();
  lost_.clear();
  has_state_ = false;
  stale_sent_.clear();
  say(LogLevel::warning, "evicted from membership " + std::to_string(epoch) + " (" +
                             std::string(why) + "); joining again as a newcomer");
  actions_.push_back(Evicted{epoch});
  announce_soon(now);
}

FrameEpoch Member::check_frame(Time now, const Uid& from, std::string_view from_name,
                               std::uint64_t epoch) {
  notice(now);
  if (epoch == active_->epoch && active()) {
    return active_->find(from) != nullptr ? FrameEpoch::current : FrameEpoch::older;
  }
  if (epoch == view_->epoch && !view_->empty()) return FrameEpoch::pending;
  if (epoch > floor_) {
    announce_soon(now);  // the broker answers with the view
    return FrameEpoch::newer;
  }
  // A peer outside all views knows nothing newer than the broker.
  if (view_->empty() || left_) return FrameEpoch::older;
  const auto [sent, first] = stale_sent_.try_emplace(from, now);
  if (first || now - sent->second >= config_.stale_every) {
    sent->second = now;
    Stale answer{*view_, now - lineage_began_};
    actions_.push_back(SendToMember{from, std::string(from_name),
                                    wire::encode(Message{config_.group, std::move(answer)})});
  }
  return FrameEpoch::older;
}

// ---- the owner

void Member::leave(Time now) {
  notice(now);
  if (left_) return;
  if (!broker_.empty()) {
    actions_.push_back(SendToBroker{wire::encode(Message{config_.group, Leave{}})});
  }
  left_ = true;
  view_ = no_view();
  active_ = no_view();
  has_state_ = false;
}

void Member::set_sort_order(Time now, std::int64_t sort) {
  if (config_.self.sort == sort) return;
  config_.self.sort = sort;
  announce_soon(now);
}

void Member::share_state(Time now, Role role) {
  if (config_.stateful && config_.self.role == role) return;
  config_.stateful = true;
  config_.self.role = role;
  announce_soon(now);
}

void Member::set_evict_after(Time now, Duration evict_after) {
  if (config_.evict_after == evict_after) return;
  config_.evict_after = evict_after;
  announce_soon(now);
}

void Member::activate(Time now, std::uint64_t epoch) {
  notice(now);
  if (view_->epoch == epoch && !view_->empty()) active_ = view_;
}

void Member::set_has_state(Time now, bool has_state) {
  state_epoch_ = view_->epoch;
  if (has_state_ == has_state) return;
  has_state_ = has_state;
  announce_soon(now);
}

void Member::ask_demotion(Time now, const Uid& instance) {
  notice(now);
  if (left_ || broker_.empty() || view_->find(instance) == nullptr) return;
  actions_.push_back(
      SendToBroker{wire::encode(Message{config_.group, Demote{view_->epoch, instance}})});
}

std::string Member::waiting_for() const {
  if (left_) return {};
  const std::string group = "group '" + config_.group + "' ";
  if (view_->empty()) {
    if (broker_.empty()) return group + "waits for its broker";
    if (!refusal_.empty()) return group + "waits to be let in: " + refusal_;
    return group + "waits to be let in by the broker";
  }
  if (!broker_.empty()) return {};
  for (const MemberInfo& member : view_->members) {
    if (unreachable_.contains(member.instance)) {
      return group + "lost '" + member.name + "' and waits for the broker to change the membership";
    }
  }
  return {};
}

}  // namespace moolink::group
