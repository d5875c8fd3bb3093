#include "accumulate/member_watch.h"

#include <algorithm>
#include <string>

#include "base/format.h"

namespace moolink::accumulate {

void MemberWatch::leave_epoch() {
  blocking_.clear();
  lagging_since_ = kNever;
  sessions_lost_.clear();
}

void MemberWatch::activate() {
  demoted_.clear();
  is_stalled_ = false;
}

void MemberWatch::session_lost(const Uid& instance) {
  if (epoch_.view().find(instance) != nullptr) sessions_lost_.insert(instance);
  demoted_.erase(instance);
}

void MemberWatch::add_facts(Flush& flush) const {
  flush.demote.assign(demoted_.begin(), demoted_.end());
  flush.stalled = is_stalled_;
}

void MemberWatch::watch(const Leader& leader, std::int64_t virtual_batch_size) {
  watch_blocking(leader, virtual_batch_size);
  watch_lagging(leader);
}

void MemberWatch::watch_blocking(const Leader& leader, std::int64_t virtual_batch_size) {
  const std::vector<Uid> blocking = leader.blocked_by(virtual_batch_size);
  std::erase_if(blocking_, [&](const auto& item) {
    return std::ranges::find(blocking, item.first) == blocking.end();
  });
  for (const Uid& instance : blocking) {
    const Blocking is{clock_.now(), leader.delivered(instance)};
    Blocking& known = blocking_.try_emplace(instance, is).first->second;
    if (known.delivered != is.delivered) known = is;
    if (clock_.now() < known.since + config_.member_stall) continue;
    known.since = clock_.now();
    demote(instance);
  }
}

void MemberWatch::demote(const Uid& instance) {
  if (sessions_lost_.contains(instance)) {
    outbox_.log(LogLevel::warning,
                epoch_.name_of(instance) +
                    " holds up the group: the session with it was lost, and the group has not "
                    "changed its membership since");
    return;
  }
  if (instance == epoch_.self()) {
    is_stalled_ = true;
  } else {
    demoted_.insert(instance);
  }
  outbox_.ask_for_view(instance, "its result slots are full, so it becomes a newcomer");
}

void MemberWatch::watch_lagging(const Leader& leader) {
  const std::vector<Uid> lagging = leader.without_oldest();
  if (lagging.empty()) {
    lagging_since_ = kNever;
    return;
  }
  if (lagging_since_ == kNever) lagging_since_ = clock_.now();
  if (clock_.now() < lagging_since_ + config_.member_stall) return;
  lagging_since_ = clock_.now();
  outbox_.log(LogLevel::warning,
              "round " + std::to_string(leader.stable() + 1) + " has had no result at " +
                  group::joined(epoch_.names_of(lagging)) + " for " +
                  in_seconds(config_.member_stall) + ": the group begins a membership change");
  const bool self_first = lagging.front() == epoch_.self() && lagging.size() > 1;
  outbox_.act(Demote{lagging[self_first ? 1 : 0]});
}

}  // namespace moolink::accumulate
