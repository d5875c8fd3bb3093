#include "group/broker.h"

#include <algorithm>
#include <utility>

#include "base/names.h"
#include "group/messages.h"
#include "group/roster.h"

namespace moolink::group {
namespace {

constexpr std::size_t kMostListed = 16'384;  // suspected peers or gaps in an announcement

}  // namespace

Broker::Broker(BrokerConfig config, std::uint64_t seed, Time now)
    : config_(config), random_(seed), started_(now), next_tick_(now), armed_at_(now) {}

Broker::~Broker() = default;

void Broker::notice(Time now) {
  if (now > next_tick_ + config_.late) armed_at_ = now + config_.disarmed;
  next_tick_ = std::max(next_tick_, now);
}

RosterTiming Broker::timing(Time now) const {
  return {now, started_ + config_.gather, now >= armed_at_};
}

void Broker::tick(Time now) {
  judge(now);
  if (now < next_tick_) return;
  next_tick_ = now + config_.tick_every;
  for (const auto& [group, roster] : rosters_) roster->decide(timing(now));
  std::erase_if(rosters_, [&](const auto& item) {
    return item.second->idle() && now - item.second->last_event() >= config_.forget_after;
  });
}

void Broker::judge(Time now) {
  notice(now);
  if (std::exchange(judge_at_, kNever) == kNever) return;
  for (const auto& [group, roster] : rosters_) {
    if (roster->has_news()) roster->decide(timing(now));
  }
}

void Broker::peer_down(Time now, const Uid& instance, Down how) {
  notice(now);
  if (how == Down::unreachable) return;
  for (const auto& [group, roster] : rosters_) {
    roster->peer_dead(instance, how);
    if (roster->has_news()) judge_at_ = now;
  }
}

void Broker::received(Time now, const Uid& from, std::span<const std::byte> bytes) {
  notice(now);
  auto message = wire::decode<Message>(bytes);
  if (message.group.size() > kMaxName) wire::fail("a group's name exceeds the limit");
  auto it = rosters_.find(message.group);
  if (auto* announce = std::get_if<Announce>(&message.body)) {
    // Every decision about the group walks these lists.
    if (announce->suspected.size() > kMostListed || announce->gaps.size() > kMostListed) {
      wire::fail("an announcement lists more peers than any group has");
    }
    if (it == rosters_.end()) {
      if (rosters_.size() >= config_.most_groups) return refuse(from, *announce, message.group);
      it = rosters_
               .emplace(message.group,
                        std::make_unique<Roster>(message.group, config_, random_, actions_))
               .first;
    }
    it->second->announced(timing(now), from, std::move(*announce));
  } else if (it == rosters_.end()) {
    return;
  } else if (const auto* demote = std::get_if<Demote>(&message.body)) {
    it->second->demotion_asked(from, *demote);
  } else if (std::holds_alternative<Leave>(message.body)) {
    it->second->left(from);
  }
  if (it->second->has_news()) judge_at_ = now;
}

void Broker::refuse(const Uid& from, const Announce& announce, const std::string& group) {
  const Message refusal{group, Refused{"the broker has " + std::to_string(rosters_.size()) +
                                       " groups already, and takes no more"}};
  actions_.push_back(Send{from, announce.self.name, group, wire::encode(refusal)});
}

std::vector<std::string> Broker::groups() const {
  std::vector<std::string> names;
  for (const auto& [group, roster] : rosters_) names.push_back(group);
  return names;
}

const View* Broker::view(std::string_view group) const {
  const auto it = rosters_.find(group);
  return it == rosters_.end() ? nullptr : &it->second->view();
}

}  // namespace moolink::group
