#include "accumulate/decision.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

namespace moolink::accumulate {
namespace {

using group::MemberInfo;
using group::Role;
using group::View;
using Flushes = std::map<Uid, Flush>;

bool is_founder(const Flush& flush) {
  return flush.founded != 0 && flush.status == StateStatus::complete;
}

// The history that continues: the view's, or another that a member still holds, because a broker
// that did not yet know its holder may have named a new one.
Uid lineage_of(const View& view, const Flushes& flushes) {
  const Flush* furthest = nullptr;
  for (const MemberInfo& member : view.members) {
    const auto at = flushes.find(member.instance);
    if (at == flushes.end() || at->second.status != StateStatus::complete) continue;
    if (is_founder(at->second)) continue;
    if (at->second.lineage == view.lineage) return view.lineage;
    if (furthest == nullptr || at->second.have > furthest->have) furthest = &at->second;
  }
  return furthest == nullptr ? view.lineage : furthest->lineage;
}

// Facts of one decision.
class Council {
 public:
  Council(const View& view, const Flushes& flushes) : view_(view), flushes_(flushes) {
    find_survivors();
    find_founder();
    choose_leader();
  }

  Decision decide();

 private:
  struct Survivor {
    const MemberInfo* member;
    const Flush* flush;
  };

  void find_survivors();
  void find_founder();
  void choose_leader();
  void settle_rounds();
  StateStatus status_of(const Survivor& survivor) const;
  MemberStatus status_of(const MemberInfo& member) const;
  bool can_complete(const Survivor& survivor) const;
  std::vector<Uid> holders(const SnapshotId& id) const;
  std::vector<Contribution> lost() const;
  const Flush* flush_of(const Uid& instance) const {
    const auto at = flushes_.find(instance);
    return at == flushes_.end() ? nullptr : &at->second;
  }
  bool is_demoted(const Uid& instance) const { return demoted_.contains(instance); }

  const View& view_;
  const Flushes& flushes_;
  std::uint64_t active_ = 0;         // the last epoch in which anything can have been cut
  std::vector<Survivor> survivors_;  // in rank order; members that share the history up to there
  std::set<Uid> demoted_;
  const MemberInfo* leader_ = nullptr;
  bool fresh_ = false;  // no member has the state: the leader's own version begins a history
  std::uint64_t round_ = 0;
  std::map<std::uint64_t, SettledRound> rounds_;  // all known ones with a donor
};

// A member is a survivor if it carried out the RESUME of the last epoch that was active: until then
// all histories are one, and since then every cut was counted. A member that does not know yet that
// the epoch became active still goes by the lineage before.
void Council::find_survivors() {
  const Uid lineage = lineage_of(view_, flushes_);
  std::vector<Survivor> candidates;
  for (const MemberInfo& member : view_.members) {
    const Flush* flush = flush_of(member.instance);
    if (flush == nullptr || flush->status == StateStatus::stateless) continue;
    if (is_founder(*flush)) continue;
    if (flush->lineage == lineage) active_ = std::max(active_, flush->active);
    if (flush->lineage != lineage && flush->applied_lineage != lineage) continue;
    candidates.push_back({&member, flush});
  }
  for (const Survivor& candidate : candidates) {
    if (candidate.flush->applied < active_) continue;
    survivors_.push_back(candidate);
    if (candidate.flush->stalled) demoted_.insert(candidate.member->instance);
    if (candidate.flush->led && candidate.flush->active == active_) {
      demoted_.insert(candidate.flush->demote.begin(), candidate.flush->demote.end());
    }
  }
}

// A history that a RESUME began, in an epoch that perhaps no member saw active, belongs to its
// founder alone. There may be several, from one epoch after the other; if no member holds another
// history, the last one continues.
void Council::find_founder() {
  const bool held = std::ranges::any_of(survivors_, [](const Survivor& survivor) {
    return survivor.flush->status == StateStatus::complete &&
           survivor.member->role != Role::observer;
  });
  if (held) return;
  std::optional<Survivor> last;
  for (const MemberInfo& member : view_.members) {
    const Flush* flush = flush_of(member.instance);
    if (flush == nullptr || member.role == Role::observer || !is_founder(*flush)) continue;
    if (flush->applied_lineage != view_.lineage || flush->founded <= active_) continue;
    if (!last || flush->founded > last->flush->founded) last = Survivor{&member, flush};
  }
  if (last) survivors_ = {*last};
}

// The leader of the last active epoch stays; else the member that applied most, then the lowest
// rank.
void Council::choose_leader() {
  const Survivor* best = nullptr;
  const auto order = [this](const Survivor& survivor) {
    const Flush& flush = *survivor.flush;
    return std::tuple(!is_demoted(survivor.member->instance), flush.led && flush.active == active_,
                      flush.version);
  };
  for (const Survivor& survivor : survivors_) {
    if (survivor.member->role == Role::observer) continue;
    if (survivor.flush->status != StateStatus::complete) continue;
    if (best == nullptr || order(survivor) > order(*best)) best = &survivor;
  }
  if (best != nullptr) {
    leader_ = best->member;
    demoted_.erase(leader_->instance);  // it is the only one left if it was demoted
    return;
  }
  // No member holds the group's state: the greatest model version among all begins anew.
  fresh_ = true;
  survivors_.clear();
  for (const MemberInfo& member : view_.members) {
    const Flush* flush = flush_of(member.instance);
    if (flush == nullptr || member.role == Role::observer) continue;
    if (leader_ == nullptr || flush->version > flush_of(leader_->instance)->version) {
      leader_ = &member;
    }
  }
}

// Every round that a survivor has stands, up to the first one that no survivor has.
void Council::settle_rounds() {
  if (fresh_) {
    round_ = flush_of(leader_->instance)->version;
    return;
  }
  for (const Survivor& survivor : survivors_) {
    for (const KnownRound& known : survivor.flush->rounds) {
      if (!known.have) continue;
      SettledRound& settled = rounds_[known.record.round];
      settled.record = known.record;
      settled.donors.push_back(survivor.member->instance);
    }
    if (survivor.flush->status != StateStatus::complete) continue;
    if (survivor.member->role == Role::observer) continue;
    round_ = std::max(round_, survivor.flush->have);
  }
  while (rounds_.contains(round_ + 1)) ++round_;
}

bool Council::can_complete(const Survivor& survivor) const {
  for (std::uint64_t round = survivor.flush->have + 1; round <= round_; ++round) {
    if (!rounds_.contains(round)) return false;
  }
  return true;
}

std::vector<Uid> Council::holders(const SnapshotId& id) const {
  std::vector<Uid> holders;
  for (const MemberInfo& member : view_.members) {
    const Flush* flush = flush_of(member.instance);
    if (flush == nullptr) continue;
    if (std::ranges::find(flush->holds, id) != flush->holds.end()) {
      holders.push_back(member.instance);
    }
  }
  return holders;
}

StateStatus Council::status_of(const Survivor& survivor) const {
  if (is_demoted(survivor.member->instance) || !can_complete(survivor))
    return StateStatus::stateless;
  if (survivor.flush->status == StateStatus::complete) return StateStatus::complete;
  const SnapshotId& id = survivor.flush->snapshot;
  const bool can_follow = id.version <= round_ && !holders(id).empty();
  return can_follow ? StateStatus::pending : StateStatus::stateless;
}

MemberStatus Council::status_of(const MemberInfo& member) const {
  MemberStatus status;
  status.instance = member.instance;
  if (fresh_ && &member == leader_) status.status = StateStatus::complete;
  for (const Survivor& survivor : survivors_) {
    if (survivor.member != &member) continue;
    status.status = status_of(survivor);
    if (status.status == StateStatus::pending) status.snapshot = survivor.flush->snapshot;
  }
  const Flush* flush = flush_of(member.instance);
  const Flush& leader = *flush_of(leader_->instance);
  if (flush != nullptr &&
      (flush->layout != leader.layout || flush->bucket_bytes != leader.bucket_bytes)) {
    status.status = StateStatus::stateless;
    status.refused = "the parameters of " + member.name + " (" + flush->layout_text +
                     ") do not fit those of the leader " + leader_->name + " (" +
                     leader.layout_text +
                     "): build the same model on every peer, with the same max_grad_norm and "
                     "on_nonfinite, or use another group";
  }
  return status;
}

std::vector<Contribution> Council::lost() const {
  std::set<std::pair<Uid, std::uint64_t>> named;
  std::vector<Contribution> lost;
  const auto consider = [&](const Contribution& contribution) {
    if (view_.find(contribution.instance) != nullptr) return;
    if (named.emplace(contribution.instance, contribution.k).second) lost.push_back(contribution);
  };
  for (const Survivor& survivor : survivors_) {
    for (const KnownRound& known : survivor.flush->rounds) {
      if (known.record.round <= round_) continue;
      for (const Contribution& contribution : known.record.contributions) consider(contribution);
    }
    if (survivor.flush->active != active_) continue;
    for (const Contribution& contribution : survivor.flush->queued) consider(contribution);
  }
  return lost;
}

Decision Council::decide() {
  Decision decision;
  Resume& resume = decision.resume;
  settle_rounds();
  resume.leader = leader_->instance;
  resume.round = round_;
  resume.fresh = fresh_;
  std::set<SnapshotId> awaited;
  for (const MemberInfo& member : view_.members) {
    resume.members.push_back(status_of(member));
    const MemberStatus& status = resume.members.back();
    if (status.status == StateStatus::pending) awaited.insert(status.snapshot);
  }
  for (const SnapshotId& id : awaited) resume.snapshots.push_back({id, holders(id)});
  std::uint64_t everywhere = round_;
  for (const Survivor& survivor : survivors_) {
    everywhere = std::min(everywhere, survivor.flush->have);
  }
  for (auto& [round, settled] : rounds_) {
    if (round > everywhere && round <= round_) resume.rounds.push_back(settled);
  }
  decision.lost = lost();
  return decision;
}

}  // namespace

Decision decide(const View& view, const Flushes& flushes) {
  return Council(view, flushes).decide();
}

}  // namespace moolink::accumulate
