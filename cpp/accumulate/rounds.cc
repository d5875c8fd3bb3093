#include "accumulate/rounds.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/crash_point.h"

namespace moolink::accumulate {
namespace {

// A member that contributed to none of this many rounds has no share of the next one.
constexpr std::uint64_t kShareMemory = 4;
// A leader waits for every result of a member, but for none of an observer; an observer may be
// behind by no more than this.
constexpr std::uint64_t kMostBehind = 4096;

[[noreturn]] void refuse(const std::string& what) {
  throw Exception(ErrorCode::invalid_argument, what);
}

}  // namespace

// --- the user ------------------------------------------------------------------------------------

std::uint64_t Rounds::offer(Time now, Buffer bucket, std::int64_t batch, Counters counters,
                            std::shared_ptr<const Progress> progress) {
  if (batch < 0 || batch > kLargestBatch) {
    refuse("a batch size is between 0 and 2^40, not " + std::to_string(batch));
  }
  if (batch > 0 && bucket.size() != config_.bucket_bytes) {
    refuse("a contribution has " + std::to_string(bucket.size()) + " bytes instead of " +
           std::to_string(config_.bucket_bytes));
  }
  if (config_.role == group::Role::observer) refuse("an observer does not contribute");
  if (counters.size() > kMostCounters) {
    refuse("a contribution has at most " + std::to_string(kMostCounters) + " counters, not " +
           std::to_string(counters.size()));
  }
  for (const auto& [name, value] : counters) {
    if (name.size() <= kLongestCounterName) continue;
    refuse("a counter's name has at most " + std::to_string(kLongestCounterName) + " bytes, not " +
           std::to_string(name.size()));
  }
  const std::uint64_t k = ledger_.add(now, std::move(bucket), batch, std::move(counters),
                                      model_.version(), std::move(progress));
  if (!model_.is_installed()) {
    outbox_.act(Dropped{ledger_.drop_own()});  // computed with parameters that are gone
    return k;
  }
  fill_in_at_ = now + config_.share_wait;
  if (epoch_.is_active()) send_offer(k);
  return k;
}

void Rounds::written(std::uint64_t k) {
  const auto own = ledger_.own().find(k);
  const bool waits = own != ledger_.own().end() && own->second.round == 0 &&
                     own->second.offered_in != epoch_.number();
  if (waits && epoch_.is_active()) send_offer(k);
}

void Rounds::withdraw(std::uint64_t k) {
  const std::uint64_t round = ledger_.withdraw(k);
  if (round != 0) abandon_round(round);
}

// The round cannot end, because a contribution of this member to it was withdrawn.
void Rounds::abandon_round(std::uint64_t round) {
  if (!epoch_.is_active()) return;
  outbox_.ask_for_view(epoch_.self(),
                       "it withdrew a contribution to round " + std::to_string(round));
}

void Rounds::send_offer(std::uint64_t k) {
  const Ledger::Own& own = ledger_.own().at(k);
  Offer offer{k, own.batch, own.counters, own.version};
  ledger_.mark_offered(k, epoch_.number());
  outbox_.send(epoch_.leader(), std::move(offer));
  crash_point("offer.sent");
}

// What a member may have offered before it waits for the rounds to be cut.
std::int64_t Rounds::whole() const {
  const Settings leaders = settings_.current();
  return leaders.virtual_batch_size * leaders.parallel_gradients;
}

// The part of the next rounds that this member fills before it waits for the others: an equal part
// for each member that contributes.
std::int64_t Rounds::share() const {
  std::int64_t sharing = contributed_.contains(epoch_.self()) ? 0 : 1;
  for (const auto& [instance, round] : contributed_) {
    const bool recent = round + kShareMemory > known_round_ || instance == epoch_.self();
    sharing += recent ? 1 : 0;
  }
  return (whole() + sharing - 1) / sharing;
}

bool Rounds::wants_gradients(Time now) const {
  const bool contributes = epoch_.is_active() && epoch_.takes_part() && model_.is_installed() &&
                           model_.keeps_up() && config_.role != group::Role::observer;
  if (!contributes) return false;
  // Gradients are of parameters less than parallel_gradients rounds old: with 1, of the newest.
  const std::uint64_t under_way = known_round_ - std::min(known_round_, ledger_.delivered());
  if (under_way >= settings_.current().parallel_gradients) return false;
  const std::int64_t uncut = ledger_.uncut_batch();
  if (uncut < share()) return true;
  // A share of another member is missing: fill in for it, at most to whole rounds of one's own.
  return uncut < whole() && (fill_in_at_ == kNever || now >= fill_in_at_);
}

std::optional<Round> Rounds::next_result() const {
  if (!model_.is_installed()) return {};
  const Ledger::Known* known = ledger_.next();
  if (known == nullptr) return {};
  // Waiting for STABLE costs a message; another copy for the user costs more on one host.
  const bool may_take = known->exclusive && ledger_.stable() >= known->record.round;
  if (known->exclusive && known->kept && !may_take) return {};
  return Round{known->record, known->result, may_take, known->times};
}

bool Rounds::checksum(std::uint64_t round, std::uint64_t value) {
  if (!epoch_.is_active() || !model_.is_complete()) return false;
  outbox_.send(epoch_.leader(), Checksum{round, value});
  return true;
}

// --- the leader and the reductions ---------------------------------------------------------------

void Rounds::resume(Time now, const Resume& resume) {
  if (auto dropped = ledger_.rewind(resume.round); !dropped.empty()) {
    outbox_.act(Dropped{std::move(dropped)});
  }
  for (const SettledRound& settled : resume.rounds) {
    const std::uint64_t round = settled.record.round;
    ledger_.add_record(now, settled.record);
    const Ledger::Known* known = ledger_.find(round);
    const std::uint64_t base = std::max(ledger_.have(), ledger_.delivered());
    if (round <= base || known == nullptr || known->have || settled.donors.empty()) continue;
    outbox_.send(settled.donors[round % settled.donors.size()], FetchResult{round});
  }
}

void Rounds::hand_on(const Uid& to, std::uint64_t round) {
  Buffer result = ledger_.hand_on(round);
  if (!result.empty()) outbox_.send(to, FetchedResult{round}, {std::move(result)});
}

bool Rounds::fetched(Time now, std::uint64_t round, const std::vector<Buffer>& parts) {
  if (parts.size() != 1 || parts[0].size() != config_.bucket_bytes) return false;
  ledger_.store(now, round, parts[0]);
  return true;
}

void Rounds::activate(const Resume& resume, collective::SharedMembers members) {
  members_ = std::move(members);
  known_round_ = resume.round;
  cuts_ignored_ = false;
  model_.set_keeps_up(false);
  notice_whether_it_keeps_up();
  reported_.reset();
  ledger_.drop_withdrawn();
  // Contributions that are in no valid round are offered again, with the same number. One that is
  // still being written is offered once it is written: it may have held up the epoch before.
  for (const auto& [k, own] : ledger_.own()) {
    if (own.round != 0 || !own.is_written()) continue;
    send_offer(k);
  }
  ledger_.set_stable(resume.round);
  contributed_.clear();
  for (const MemberStatus& member : resume.members) {
    if (!member.refused.empty() || member.status != StateStatus::complete) continue;
    const bool observes = epoch_.view().find(member.instance)->role == group::Role::observer;
    if (!observes) contributed_[member.instance] = known_round_;
  }
}

bool Rounds::cut(Time now, const Uid& from, const Cut& cut) {
  const RoundRecord& record = cut.record;
  const bool in_order = record.round == known_round_ + 1;
  if (from != epoch_.leader() || !in_order || !epoch_.takes_part()) return false;
  const std::uint64_t most = config_.role == group::Role::observer ? kMostBehind : kMostParallel;
  const std::uint64_t has = std::max(ledger_.have(), ledger_.delivered());
  if (record.round > has && record.round - has > most) {
    if (!std::exchange(cuts_ignored_, true)) {
      outbox_.log(LogLevel::warning,
                  epoch_.name_of(from) + " has cut more than " + std::to_string(most) +
                      " rounds beyond those that have results here: they are ignored");
    }
    return false;
  }
  known_round_ = record.round;
  ledger_.add_record(now, record);
  Ledger::Inputs mine = ledger_.inputs(record);
  Reduce reduce{epoch_.number(),         record.round, record.total, std::move(mine.buckets),
                std::move(mine.written), {},           cut.shared};
  for (std::uint32_t rank = 0; rank < members_->size(); ++rank) {
    const Uid& instance = (*members_)[rank].instance;
    const bool contributes = std::ranges::any_of(record.contributions, [&](const Contribution& c) {
      return c.instance == instance && c.batch > 0;
    });
    if (!contributes) continue;
    reduce.contributors.push_back(rank);
    contributed_[instance] = record.round;
  }
  outbox_.act(std::move(reduce));
  crash_point("reduce.sent");
  if (ledger_.withdrew(record.round)) abandon_round(record.round);
  return true;
}

void Rounds::stable(const Uid& from, const Stable& stable) {
  if (from != epoch_.leader()) return;
  ledger_.set_stable(stable.round);
  outbox_.wake();
}

void Rounds::diverged(const Uid& from, const Diverged& diverged) {
  if (from != epoch_.leader()) return;
  // A later state is the leader's: differences from before it do not matter any more.
  const bool mine =
      std::ranges::find(diverged.instances, epoch_.self()) != diverged.instances.end();
  const bool here = mine && model_.is_installed() && diverged.round > model_.snapshot().version &&
                    !epoch_.is_leader();
  outbox_.act(Divergence{diverged.round, epoch_.names_of(diverged.instances), here});
}

bool Rounds::reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result,
                     bool exclusive) {
  if (!epoch_.is_active() || epoch != epoch_.number()) return false;
  ledger_.store(now, round, std::move(result), exclusive);
  return true;
}

bool Rounds::reduce_failed(std::uint64_t epoch, std::uint64_t round, const Error& error) {
  if (!epoch_.is_active() || epoch != epoch_.number()) return false;
  // The round stays without HAVE; the leader notices that and starts a change of epoch.
  outbox_.log(LogLevel::error,
              "round " + std::to_string(round) + " was not reduced: " + error.message);
  return true;
}

// --- due work ------------------------------------------------------------------------------------

// Once a member was near the last round it stays so, because the leader waits for it from then on.
void Rounds::notice_whether_it_keeps_up() {
  const std::uint64_t slots = std::uint64_t{settings_.current().parallel_gradients} + 1;
  if (!model_.is_installed()) {
    model_.set_keeps_up(false);
  } else if (known_round_ <= ledger_.delivered() + slots) {
    model_.set_keeps_up(true);
  }
}

void Rounds::report_have() {
  notice_whether_it_keeps_up();
  const Have have{ledger_.have(), ledger_.delivered(), model_.keeps_up()};
  if (reported_ == have) return;
  reported_ = have;
  outbox_.send(epoch_.leader(), have);
  crash_point("have.sent");
}

// No later cut is in order in this epoch, so once all results are here another epoch must begin.
void Rounds::catch_up_when_cuts_were_ignored() {
  if (!cuts_ignored_ || ledger_.have() < known_round_) return;
  cuts_ignored_ = false;
  outbox_.ask_for_view(epoch_.self(), "it was left behind by too many rounds");
}

void Rounds::tick(Time now) {
  if (now < fill_in_at_) return;
  fill_in_at_ = kNever;
  outbox_.wake();
}

}  // namespace moolink::accumulate
