// From a view to an active epoch: FLUSH, RESUME, READY, GO, and the soft views that wait for a
// boundary between two rounds.

#include <algorithm>
#include <set>

#include "accumulate/machine.h"
#include "base/crash_point.h"
#include "base/mutant.h"
#include "base/names.h"

namespace moolink::accumulate {
namespace {

// How often FLUSH is repeated: a peer may be in a view before its accumulator is made, and messages
// sent to it until then are lost.
constexpr Duration kFlushAgain = milliseconds(250);
// A member that still FLUSHes so long after the decision missed it: its accumulator was made since.
constexpr Duration kLateTimeout = seconds(2);

}  // namespace

// --- views -----------------------------------------------------------------------------------

void Machine::view(Time now, const group::SharedView& view) {
  const std::uint64_t newest = pending_view_ ? pending_view_->epoch : epoch_;
  if (view->epoch <= newest || view->find(config_.instance) == nullptr) return;
  if (view->soft && phase_ == Phase::active) {
    pending_view_ = view;
    if (pending_deadline_ == kNever) pending_deadline_ = now + config_.soft_view_wait;
  } else {
    enter(view);
  }
  settle(now);
}

void Machine::enter_pending_when_due(Time now) {
  if (!pending_view_) return;
  if (now < pending_deadline_ && move_to_ < pending_view_->epoch) return;
  enter(pending_view_);
}

void Machine::evicted(Time now) {
  if (phase_ == Phase::outside) return;
  leave_epoch();
  phase_ = Phase::outside;
  wake();
  settle(now);
}

// Nothing of the old epoch is applied from here on; FLUSH carries the facts that only its leader
// knows.
void Machine::leave_epoch() {
  if (leader_) {
    led_.led = true;
    led_.queued = leader_->queued();
  }
  leader_.reset();
  wants_state_.reset();
  pending_view_.reset();
  pending_deadline_ = kNever;
  blocking_.clear();
  lagging_since_ = kNever;
  shared_cuts_ = 0;
  leaders_settings_.reset();
  actions_.push_back(EnterEpoch{std::make_shared<const collective::EpochMembers>()});
}

void Machine::enter(group::SharedView view) {
  leave_epoch();
  phase_ = Phase::flushing;
  epoch_ = view->epoch;
  view_ = std::move(view);
  sessions_lost_.clear();
  flushes_.clear();
  ready_.clear();
  decision_.reset();
  resume_.reset();
  went_ = is_ready_ = installed_since_flush_ = false;
  late_.clear();
  flush_progress_ = awake_;
  if (view_->soft) actions_.push_back(Activate{epoch_});
  send_flush();
  replay_early();
}

void Machine::send_flush() {
  const group::MemberInfo* rank_0 = coordinator();
  if (rank_0 == nullptr) {
    if (standing_ == Standing::stateless && config_.role == group::Role::observer && states_ > 0) {
      log(LogLevel::warning,
          "the members left before this observer got the state anew: it waits for a member");
    }
    return;
  }
  flush_again_ = awake_ + kFlushAgain;
  send(rank_0->instance, facts());
  crash_point("flush.sent");
}

// Rank 0; observers decide nothing and have the last ranks.
const group::MemberInfo* Machine::coordinator() const {
  if (view_->members.empty()) return nullptr;
  const group::MemberInfo& first = view_->members.front();
  return first.role == group::Role::observer ? nullptr : &first;
}

Flush Machine::facts() const {
  Flush flush;
  flush.standing = is_state_refused_ ? Standing::stateless : standing_;
  flush.lineage = lineage_;
  flush.applied = applied_;
  flush.applied_lineage = applied_lineage_;
  flush.active = active_;
  flush.founded = founded_;
  flush.version = user_version_;
  flush.have = ledger_.have();
  flush.snapshot = snapshot_;
  for (const auto& [id, held] : held_) flush.holds.push_back(id);
  for (const auto& [round, known] : ledger_.known()) {
    flush.rounds.push_back({known.record, known.kept});
  }
  flush.led = led_.led;
  flush.queued = led_.queued;
  flush.demote.assign(led_.demote.begin(), led_.demote.end());
  flush.stalled = stalled_;
  flush.layout = config_.layout;
  flush.bucket_bytes = config_.bucket_bytes;
  flush.layout_text = config_.layout_text;
  return flush;
}

// --- the coordinator -------------------------------------------------------------------------

std::vector<Uid> Machine::missing_in_flush() const {
  const group::MemberInfo* rank_0 = coordinator();
  if (rank_0 == nullptr) return {};
  if (rank_0->instance != config_.instance) return {rank_0->instance};
  std::vector<Uid> missing;
  for (const group::MemberInfo& member : view_->members) {
    if (member.role == group::Role::observer) continue;
    const bool here =
        decision_ ? ready_.contains(member.instance) : flushes_.contains(member.instance);
    if (!here) missing.push_back(member.instance);
  }
  return missing;
}

void Machine::on(const Arrival& at, const Flush& flush) {
  const group::MemberInfo* rank_0 = coordinator();
  if (rank_0 == nullptr || rank_0->instance != config_.instance) return;
  if (flush.have > kLargestRound || flush.version > kLargestRound) {
    log(LogLevel::warning,
        name_of(at.from) + " sent a FLUSH of an impossible version; it is ignored");
    return;  // watch_flush asks for another epoch, without it
  }
  if (decision_) {
    Time& since = late_.try_emplace(at.from, awake_).first->second;
    if (awake_ < since + kLateTimeout) return;
    since = awake_;
    ask_for_view(at.from, "it came late to membership change " + std::to_string(epoch_));
    return;
  }
  // A repeated FLUSH is no progress.
  if (flushes_.insert_or_assign(at.from, flush).second) flush_progress_ = awake_;
  if (!missing_in_flush().empty()) return;
  decision_ = decide(*view_, flushes_);
  broadcast(decision_->resume);
  crash_point("resume.sent");
  if (mutant("go_without_ready")) broadcast(Go{decision_->lost});
}

void Machine::on(const Arrival& at, const Ready&) {
  if (!decision_) return;
  ready_.insert(at.from);
  flush_progress_ = awake_;
  if (went_ || !missing_in_flush().empty() || mutant("go_without_ready")) return;
  went_ = true;
  broadcast(Go{decision_->lost});
  crash_point("go.sent");
}

// The coordinator gets time to find the members that do not answer.
Time Machine::flush_deadline() const {
  const group::MemberInfo* rank_0 = coordinator();
  const bool decides = rank_0 != nullptr && rank_0->instance == config_.instance;
  return flush_progress_ + (decides ? 1 : 2) * config_.member_stall;
}

// A member does not answer, though the broker hears it: another epoch begins from the same facts.
void Machine::watch_flush() {
  const group::MemberInfo* rank_0 = coordinator();
  const bool elsewhere = rank_0 != nullptr && rank_0->instance != config_.instance;
  if (phase_ == Phase::flushing && elsewhere && awake_ >= flush_again_ && !mutant("flush_once")) {
    send_flush();
  }
  if (awake_ < flush_deadline()) return;
  flush_progress_ = awake_;
  for (const Uid& instance : missing_in_flush()) {
    ask_for_view(instance, "it does not answer in membership change " + std::to_string(epoch_));
  }
}

// --- RESUME ------------------------------------------------------------------------------------

void Machine::on(const Arrival& at, const Resume& resume) {
  const group::MemberInfo* rank_0 = coordinator();
  if (phase_ != Phase::flushing || rank_0 == nullptr || at.from != rank_0->instance) return;
  if (const char* fault = fault_of(resume)) {
    log(LogLevel::warning, name_of(at.from) + " sent a RESUME that " + fault + "; it is ignored");
    return;  // watch_flush asks for another epoch
  }
  // RESUME names the version that FLUSH had: the state installed since then would be renumbered.
  const bool is_outdated = resume.fresh && resume.leader == config_.instance &&
                           installed_since_flush_ && resume.round != user_version_;
  if (is_outdated) {
    return ask_for_view(config_.instance,
                        "its user installed a state during the membership change");
  }
  for (const MemberStanding& mine : resume.members) {
    if (mine.instance != config_.instance) continue;
    resume_ = resume;
    phase_ = Phase::resuming;
    flush_progress_ = awake_;
    carry_out(at.now, mine);
    ready_when_complete();
    return;
  }
}

// The fault that no coordinator that follows the protocol can make; else null.
const char* Machine::fault_of(const Resume& resume) const {
  if (resume.round > kLargestRound) return "names an impossible version";
  std::set<Uid> instances;
  bool any_accepted = false;
  for (const MemberStanding& member : resume.members) {
    const bool known = view_->find(member.instance) != nullptr;
    if (!known || !instances.insert(member.instance).second) return "names other members";
    any_accepted = any_accepted || member.refused.empty();
    // A member that continues has, or is told of, every round up to the last.
    const bool here = member.instance == config_.instance;
    if (!here || member.standing == Standing::stateless || resume.fresh) continue;
    const std::uint64_t have = ledger_.have();
    if (resume.round > have && resume.round - have > resume.rounds.size()) {
      return "leaves rounds out";
    }
  }
  return any_accepted && instances.contains(resume.leader) ? nullptr : "is without a leader";
}

void Machine::carry_out(Time now, const MemberStanding& mine) {
  if (mine.refused != refused_) {
    const bool again = mine.refused.empty();  // it takes part again
    actions_.push_back(Failed{{.code = again ? ErrorCode::none : ErrorCode::invalid_argument,
                               .message = mine.refused,
                               .function = joined_names_text(config_.group)}});
  }
  refused_ = mine.refused;
  std::erase_if(held_, [this](const auto& item) {
    const auto& awaited = resume_->snapshots;
    return std::ranges::none_of(awaited,
                                [&](const SnapshotHolders& s) { return s.id == item.first; });
  });
  if (mine.standing == Standing::stateless || resume_->fresh) become_stateless(resume_->round);
  if (mine.standing == Standing::stateless) return;
  if (resume_->fresh) {
    standing_ = Standing::complete;
    installed_ = true;
    founded_ = epoch_;
    begin_history(resume_->round);
    return;
  }
  // The snapshot may have been completed since FLUSH; that only helps.
  if (auto dropped = ledger_.rewind(resume_->round); !dropped.empty()) {
    actions_.push_back(Dropped{std::move(dropped)});
  }
  for (const SettledRound& settled : resume_->rounds) {
    ledger_.add_record(now, settled.record);
    const Ledger::Known* known = ledger_.find(settled.record.round);
    const std::uint64_t base = std::max(ledger_.have(), ledger_.delivered());
    if (settled.record.round <= base || known == nullptr || known->have) continue;
    if (settled.donors.empty()) continue;
    const std::size_t donor = settled.record.round % settled.donors.size();
    send(settled.donors[donor], FetchResult{settled.record.round});
  }
  if (fetch_ == std::nullopt) return;
  for (const SnapshotHolders& snapshot : resume_->snapshots) {
    if (snapshot.id == fetch_->id()) fetch_->set_parents(now, snapshot.holders);
  }
  pump_fetch(now);
}

// Rounds are numbered from the version in FLUSH; the user may have set another one since.
void Machine::begin_history(std::uint64_t version) {
  ledger_.reset(version, true);
  if (user_version_ != version) {
    log(LogLevel::warning, "the group begins at version " + std::to_string(version) +
                               ": this model's version was set to " +
                               std::to_string(user_version_) + " too late");
  }
  user_version_ = version;
}

// This peer's contributions and promised snapshots belong to a history that it left. Its parameters
// stay as they are until a snapshot replaces them.
void Machine::become_stateless(std::uint64_t round) {
  if (auto dropped = ledger_.drop_own(); !dropped.empty()) {
    actions_.push_back(Dropped{std::move(dropped)});
  }
  ledger_.reset(round, false);
  standing_ = Standing::stateless;
  founded_ = 0;
  installed_ = keeps_up_ = resync_ = false;
  drop_fetch();
  drop_new_state();
  snapshot_ = {};
}

void Machine::on(const Arrival& at, const FetchResult& fetch) {
  Buffer result = ledger_.hand_on(fetch.round);
  if (!result.empty()) send(at.from, FetchedResult{fetch.round}, {std::move(result)});
}

void Machine::on(const Arrival& at, const FetchedResult& got) {
  if (phase_ != Phase::resuming || at.parts.size() != 1) return;
  if (at.parts[0].size() != config_.bucket_bytes) return;
  flush_progress_ = awake_;
  ledger_.store(at.now, got.round, at.parts[0]);
  ready_when_complete();
}

void Machine::ready_when_complete() {
  if (is_ready_ || !ledger_.missing(resume_->round).empty()) return;
  is_ready_ = true;
  applied_ = epoch_;
  applied_lineage_ = view_->lineage;
  send(coordinator()->instance, Ready{});
  crash_point("ready.sent");
  replay_early();
}

// --- GO ------------------------------------------------------------------------------------------

void Machine::on(const Arrival& at, const Go& go) {
  if (phase_ == Phase::resuming && at.from == coordinator()->instance) activate(at.now, go);
}

void Machine::activate(Time, const Go& go) {
  phase_ = Phase::active;
  active_ = epoch_;
  founded_ = 0;
  lineage_ = view_->lineage;
  leader_id_ = resume_->leader;
  known_round_ = announced_stable_ = resume_->round;
  successor_at_ = awake_;
  moved_ = stalled_ = requested_ = keeps_up_ = cuts_ignored_ = false;
  notice_whether_it_keeps_up();
  led_ = {};
  reported_.reset();
  ledger_.drop_withdrawn();
  // Contributions that are in no valid round are offered again, with the same number. One that is
  // still being written is offered once it is written: it may have held up the epoch before.
  for (const auto& [k, own] : ledger_.own()) {
    if (!own.is_written()) continue;
    if (own.round == 0 ? !mutant("drop_reoffer") : mutant("offer_twice_after_flush")) send_offer(k);
  }
  ledger_.set_stable(resume_->round);
  contributed_.clear();
  std::vector<collective::EpochMembers::Member> members;
  for (const MemberStanding& member : resume_->members) {
    if (!member.refused.empty()) continue;
    const group::MemberInfo& info = *view_->find(member.instance);
    const bool observes = info.role == group::Role::observer;
    members.push_back({info.instance, info.name, info.host_key, observes});
    if (!observes && member.standing == Standing::complete) {
      contributed_[info.instance] = known_round_;
    }
  }
  members_ = std::make_shared<const collective::EpochMembers>(epoch_, std::move(members));
  if (refused_.empty()) actions_.push_back(EnterEpoch{members_});
  if (leader_id_ == config_.instance) start_leading();
  if (!go.lost.empty()) actions_.push_back(Lost{go.lost});
  actions_.push_back(HasState{standing_ == Standing::complete});
  for (const MemberStanding& member : resume_->members) {
    if (member.instance == config_.instance && member.standing == Standing::pending &&
        standing_ == Standing::complete) {
      send(leader_id_, SnapshotComplete{member.snapshot});  // it arrived during the change
    }
  }
  replay_early();
  wake();
}

void Machine::start_leading() {
  std::map<Uid, Leader::Peer> peers;
  for (const MemberStanding& member : resume_->members) {
    if (!member.refused.empty()) continue;
    const group::MemberInfo& info = *view_->find(member.instance);
    peers[member.instance] = {info.name, info.role == group::Role::observer,
                              member.standing == Standing::complete,
                              member.standing == Standing::stateless};
  }
  Leader::Config config;
  config.epoch = epoch_;
  config.round = resume_->round;
  config.parallel_gradients = own_settings().parallel_gradients;
  config.snapshot_gather = config_.snapshot_gather;
  leader_ = std::make_unique<Leader>(config, peers);
  for (const MemberStanding& member : resume_->members) {
    if (member.standing == Standing::pending) leader_->awaits(member.instance, member.snapshot);
  }
  broadcast(own_settings());
}

}  // namespace moolink::accumulate
