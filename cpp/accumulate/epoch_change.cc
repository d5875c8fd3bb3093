#include "accumulate/epoch_change.h"

#include <memory>
#include <utility>

#include "base/crash_point.h"
#include "base/names.h"

namespace moolink::accumulate {
namespace {

// How often FLUSH is repeated: a peer may be in a view before its accumulator is made, and messages
// sent to it until then are lost.
constexpr Duration kFlushAgain = milliseconds(250);
// A member that still FLUSHes so long after the decision missed it: its accumulator was made since.
constexpr Duration kLateTimeout = seconds(2);

}  // namespace

// --- FLUSH ---------------------------------------------------------------------------------------

void EpochChange::enter(group::SharedView view) {
  epoch_.enter(std::move(view));
  flushes_.clear();
  ready_.clear();
  decision_.reset();
  resume_.reset();
  go_sent_ = is_ready_ = false;
  late_.clear();
  progressed();
  if (epoch_.view().soft) outbox_.act(Activate{epoch_.number()});
}

void EpochChange::add_facts(Flush& flush) const {
  flush.lineage = lineage_;
  flush.applied = applied_;
  flush.applied_lineage = applied_lineage_;
  flush.active = active_;
  flush.founded = founded_;
}

void EpochChange::flush(Flush facts) {
  flush_again_ = clock_.now() + kFlushAgain;
  outbox_.send(epoch_.coordinator()->instance, std::move(facts));
  crash_point("flush.sent");
}

bool EpochChange::is_flush_due() const {
  return epoch_.phase() == Epoch::Phase::flushing && epoch_.coordinator() != nullptr &&
         !coordinates() && clock_.now() >= flush_again_;
}

// --- the coordinator -----------------------------------------------------------------------------

void EpochChange::member_flushed(const Uid& from, const Flush& flush) {
  if (!coordinates()) return;
  if (flush.have > kLargestRound || flush.version > kLargestRound) {
    outbox_.log(LogLevel::warning,
                epoch_.name_of(from) + " sent a FLUSH of an impossible version; it is ignored");
    return;  // watch() asks for another epoch, without it
  }
  if (decision_) {
    Time& since = late_.try_emplace(from, clock_.now()).first->second;
    if (clock_.now() < since + kLateTimeout) return;
    since = clock_.now();
    outbox_.ask_for_view(from,
                         "it came late to membership change " + std::to_string(epoch_.number()));
    return;
  }
  // A repeated FLUSH is no progress.
  if (flushes_.insert_or_assign(from, flush).second) progressed();
  if (!missing().empty()) return;
  decision_ = decide(epoch_.view(), flushes_);
  outbox_.broadcast(decision_->resume);
  crash_point("resume.sent");
}

void EpochChange::member_ready(const Uid& from) {
  if (!decision_) return;
  ready_.insert(from);
  progressed();
  if (go_sent_ || !missing().empty()) return;
  go_sent_ = true;
  outbox_.broadcast(Go{decision_->lost});
  crash_point("go.sent");
}

// --- RESUME, READY and GO ------------------------------------------------------------------------

bool EpochChange::accepts(const Uid& from, const Resume& resume, std::uint64_t have) const {
  if (epoch_.phase() != Epoch::Phase::flushing || !epoch_.is_coordinator(from)) return false;
  const char* fault = fault_of(resume, have);
  if (fault == nullptr) return true;
  outbox_.log(LogLevel::warning,
              epoch_.name_of(from) + " sent a RESUME that " + fault + "; it is ignored");
  return false;  // watch() asks for another epoch
}

// The fault that no coordinator that follows the protocol can make; else null.
const char* EpochChange::fault_of(const Resume& resume, std::uint64_t have) const {
  if (resume.round > kLargestRound) return "names an impossible version";
  std::set<Uid> instances;
  bool any_accepted = false;
  for (const MemberStatus& member : resume.members) {
    const bool known = epoch_.view().find(member.instance) != nullptr;
    if (!known || !instances.insert(member.instance).second) return "names other members";
    any_accepted = any_accepted || member.refused.empty();
    // RESUME names every round that a continuing member does not have.
    const bool here = member.instance == epoch_.self();
    if (!here || member.status == StateStatus::stateless || resume.fresh) continue;
    if (resume.round > have && resume.round - have > resume.rounds.size()) {
      return "leaves rounds out";
    }
  }
  return any_accepted && instances.contains(resume.leader) ? nullptr : "is without a leader";
}

void EpochChange::carry_out(const Resume& resume, const MemberStatus& mine) {
  if (mine.refused != epoch_.refusal()) {
    const bool again = mine.refused.empty();  // it takes part again
    outbox_.act(Failed{{.code = again ? ErrorCode::none : ErrorCode::invalid_argument,
                        .message = mine.refused,
                        .function = joined_names_text(config_.group)}});
  }
  resume_ = resume;
  epoch_.resume(mine.refused);
  progressed();
}

void EpochChange::ready() {
  is_ready_ = true;
  applied_ = epoch_.number();
  applied_lineage_ = epoch_.view().lineage;
  outbox_.send(epoch_.coordinator()->instance, Ready{});
  crash_point("ready.sent");
}

void EpochChange::activate() {
  epoch_.activate(resume_->leader);
  active_ = epoch_.number();
  founded_ = 0;
  lineage_ = epoch_.view().lineage;
}

collective::SharedMembers EpochChange::members() const {
  std::vector<collective::EpochMembers::Member> members;
  for (const MemberStatus& member : resume_->members) {
    if (!member.refused.empty()) continue;
    const group::MemberInfo& info = *epoch_.view().find(member.instance);
    members.push_back(
        {info.instance, info.name, info.host_key, info.role == group::Role::observer});
  }
  return std::make_shared<const collective::EpochMembers>(epoch_.number(), std::move(members));
}

// --- members that do not answer ------------------------------------------------------------------

// A member does not answer, though the broker hears it: another epoch begins from the same facts.
void EpochChange::watch() {
  // The coordinator gets time to find the members that do not answer.
  if (clock_.now() < progress_ + (coordinates() ? 1 : 2) * config_.member_stall) return;
  progressed();
  for (const Uid& instance : missing()) {
    outbox_.ask_for_view(
        instance, "it does not answer in membership change " + std::to_string(epoch_.number()));
  }
}

std::vector<Uid> EpochChange::missing() const {
  const group::MemberInfo* rank_0 = epoch_.coordinator();
  if (rank_0 == nullptr) return {};
  if (!coordinates()) return {rank_0->instance};
  std::vector<Uid> missing;
  for (const group::MemberInfo& member : epoch_.view().members) {
    if (member.role == group::Role::observer) continue;
    const bool here =
        decision_ ? ready_.contains(member.instance) : flushes_.contains(member.instance);
    if (!here) missing.push_back(member.instance);
  }
  return missing;
}

std::string EpochChange::explain() const {
  const std::string change = " in membership change " + std::to_string(epoch_.number());
  const std::vector<std::string> names = epoch_.names_of(missing());
  if (names.empty()) return "the other members" + change;
  return group::joined(names, "'") + change + ": no accumulator '" +
         joined_names_text(config_.group) +
         "' answers there; every member of the group must make one of this name, and keep it as "
         "long as it is a member";
}

}  // namespace moolink::accumulate
