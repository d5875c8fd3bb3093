// Rounds in an active epoch: offers, cuts, results, and how the leader treats members that hold the
// group up.

#include <algorithm>

#include "accumulate/machine.h"
#include "base/crash_point.h"
#include "base/format.h"
#include "base/mutant.h"
#include "base/names.h"

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

// --- the user's side -----------------------------------------------------------------------------

void Machine::set_model_version(std::uint64_t version) {
  if (standing_ == Standing::complete && version != user_version_) {
    refuse("group '" + joined_names_text(config_.group) + "' is at version " +
           std::to_string(user_version_) + " already: a model's version is set before connect()");
  }
  user_version_ = version;
}

void Machine::set_virtual_batch_size(std::int64_t size) {
  if (size < 1) refuse("the virtual batch size must be positive, not " + std::to_string(size));
  config_.virtual_batch_size = size;
  if (leader_) broadcast(own_settings());
}

void Machine::set_parallel_gradients(std::uint32_t rounds) {
  if (rounds < 1 || rounds > kMostParallel) {
    refuse("the number of parallel gradients is between 1 and " + std::to_string(kMostParallel) +
           ", not " + std::to_string(rounds));
  }
  config_.parallel_gradients = rounds;
  if (!leader_) return;
  leader_->set_parallel_gradients(rounds);
  broadcast(own_settings());
}

// The settings this peer leads with, or would.
Settings Machine::own_settings() const {
  return {std::max<std::int64_t>(1, config_.virtual_batch_size),
          std::max<std::uint32_t>(1, config_.parallel_gradients)};
}

void Machine::on(const Arrival& at, const Settings& settings) {
  const bool possible =
      settings.virtual_batch_size >= 1 && settings.virtual_batch_size <= kLargestBatch &&
      settings.parallel_gradients >= 1 && settings.parallel_gradients <= kMostParallel;
  if (at.from != leader_id_ || !possible) return;
  leaders_settings_ = settings;
  if (wants_gradients(at.now)) wake();
}

// The user's settings that differ from the leader's, if any. A setting that was never set differs
// from none.
std::string Machine::difference(const Settings& leaders) const {
  const auto told = [this](const char* what, auto theirs, auto mine, const char* method) {
    return std::string("the ") + what + " is " + std::to_string(theirs) + " at the leader '" +
           name_of(leader_id_) + "' and " + std::to_string(mine) + " at this peer, '" +
           config_.name + "': call " + method + "() with the same number on every peer";
  };
  const std::int64_t batch = config_.virtual_batch_size;
  if (batch != 0 && batch != leaders.virtual_batch_size) {
    return told("virtual batch size", leaders.virtual_batch_size, batch, "set_virtual_batch_size");
  }
  const std::uint32_t parallel = config_.parallel_gradients;
  if (parallel != 0 && parallel != leaders.parallel_gradients) {
    return told("number of parallel gradients", leaders.parallel_gradients, parallel,
                "set_parallel_gradients");
  }
  return {};
}

// Peers change their settings one after the other, and the leader's hold meanwhile; a lasting
// difference is a mistake, which would show when another peer leads.
void Machine::watch_settings() {
  if (!refused_.empty() || config_.role == group::Role::observer) return;
  if (!leader_ && !leaders_settings_) return;  // not known in this epoch yet
  const std::string text = leader_ ? std::string() : difference(*leaders_settings_);
  if (text.empty()) {
    differs_since_ = kNever;
    if (std::exchange(settings_refused_, false)) actions_.push_back(Failed{});
    return;
  }
  if (differs_since_ == kNever) differs_since_ = awake_;
  if (awake_ < differs_since_ + config_.settings_timeout) return;
  if (std::exchange(settings_refused_, true)) return;
  actions_.push_back(Failed{{.code = ErrorCode::invalid_argument,
                             .message = "for " + in_seconds(config_.settings_timeout) + " " + text,
                             .function = joined_names_text(config_.group)}});
}

std::uint64_t Machine::offer(Time now, Buffer bucket, std::int64_t batch, Counters counters,
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
                                      user_version_, std::move(progress));
  if (standing_ != Standing::complete || !installed_) {
    actions_.push_back(Dropped{ledger_.drop_own()});  // computed with parameters that are gone
    return k;
  }
  fill_in_at_ = now + config_.share_wait;
  if (phase_ == Phase::active) send_offer(k);
  settle(now);
  return k;
}

void Machine::written(Time now, std::uint64_t k) {
  const auto own = ledger_.own().find(k);
  const bool waits = own != ledger_.own().end() && own->second.round == 0 &&
                     own->second.offered_in != epoch_ && !mutant("forget_what_was_unwritten");
  if (waits && phase_ == Phase::active) send_offer(k);
  settle(now);
}

void Machine::withdraw(Time now, std::uint64_t k) {
  const std::uint64_t round = ledger_.withdraw(k);
  if (round != 0) abandon_round(round);
  settle(now);
}

// The round cannot end, because a contribution of this member to it was withdrawn.
void Machine::abandon_round(std::uint64_t round) {
  if (phase_ != Phase::active) return;
  ask_for_view(config_.instance, "it withdrew a contribution to round " + std::to_string(round));
}

void Machine::send_offer(std::uint64_t k) {
  const Ledger::Own& own = ledger_.own().at(k);
  Counters counters = own.counters;
  if (mutant("counters_twice") && own.offered_in != 0) {
    for (auto& [name, value] : counters) value *= 2;
  }
  ledger_.mark_offered(k, epoch_);
  send(leader_id_, Offer{k, own.batch, std::move(counters), own.version});
  crash_point("offer.sent");
}

void Machine::delivered(Time now, std::uint64_t r) {
  user_version_ = r;
  if (standing_ == Standing::complete) ledger_.set_delivered(r);
  settle(now);
}

// The part of the next rounds that this member fills before it waits for the others: an equal part
// for each member that contributes.
std::int64_t Machine::share() const {
  std::int64_t sharing = contributed_.contains(config_.instance) ? 0 : 1;
  for (const auto& [instance, round] : contributed_) {
    const bool recent = round + kShareMemory > known_round_ || instance == config_.instance;
    sharing += recent ? 1 : 0;
  }
  const Settings leaders = settings();
  const std::int64_t whole = leaders.virtual_batch_size * leaders.parallel_gradients;
  return (whole + sharing - 1) / sharing;
}

void Machine::checksum(Time now, std::uint64_t round, std::uint64_t value) {
  if (phase_ != Phase::active || standing_ != Standing::complete) return;
  send(leader_id_, Checksum{round, value});
  settle(now);
}

// --- rounds --------------------------------------------------------------------------------------

void Machine::on(const Arrival& at, const Cut& cut) {
  const RoundRecord& record = cut.record;
  const bool in_order = record.round == known_round_ + 1 || mutant("accept_old_epoch_cut");
  if (at.from != leader_id_ || !in_order || !refused_.empty()) return;
  const std::uint64_t most = config_.role == group::Role::observer ? kMostBehind : kMostParallel;
  const std::uint64_t has = std::max(ledger_.have(), ledger_.delivered());
  if (record.round > has && record.round - has > most) {
    if (!std::exchange(cuts_ignored_, true)) {
      log(LogLevel::warning, name_of(at.from) + " has cut more than " + std::to_string(most) +
                                 " rounds beyond those that have results here: they are ignored");
    }
    return;
  }
  known_round_ = record.round;
  ledger_.add_record(at.now, record);
  Ledger::Inputs mine = ledger_.inputs(record);
  Reduce reduce{
      epoch_, record.round, record.total, std::move(mine.buckets), std::move(mine.written),
      {},     cut.shared};
  for (std::uint32_t rank = 0; rank < members_->size(); ++rank) {
    const Uid& instance = (*members_)[rank].instance;
    const bool contributes = std::ranges::any_of(record.contributions, [&](const Contribution& c) {
      return c.instance == instance && c.batch > 0;
    });
    if (!contributes) continue;
    reduce.contributors.push_back(rank);
    contributed_[instance] = record.round;
  }
  actions_.push_back(std::move(reduce));
  crash_point("reduce.sent");
  if (ledger_.withdrew(record.round)) abandon_round(record.round);
  // A user that waits for the result is not woken before it is here.
  if (wants_gradients(at.now)) wake();
}

void Machine::reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result,
                      bool exclusive) {
  if (phase_ != Phase::active || epoch != epoch_) return;
  ledger_.store(now, round, std::move(result), exclusive);
  if (next_result()) wake();  // else STABLE will
  settle(now);
}

void Machine::reduce_failed(Time now, std::uint64_t epoch, std::uint64_t round,
                            const Error& error) {
  if (phase_ != Phase::active || epoch != epoch_) return;
  // The round stays without HAVE; the leader notices that and starts a change of epoch.
  log(LogLevel::error, "round " + std::to_string(round) + " was not reduced: " + error.message);
  settle(now);
}

// Once a member was near the last round it stays so, because the leader waits for it from then on.
void Machine::notice_whether_it_keeps_up() {
  const std::uint64_t slots = std::uint64_t{settings().parallel_gradients} + 1;
  if (standing_ != Standing::complete || !installed_) {
    keeps_up_ = false;
  } else if (known_round_ <= ledger_.delivered() + slots) {
    keeps_up_ = true;
  }
}

void Machine::report_have() {
  notice_whether_it_keeps_up();
  Have have{ledger_.have(), ledger_.delivered(), keeps_up_};
  if (mutant("have_before_result")) have.have = known_round_;
  if (reported_ == have) return;
  reported_ = have;
  send(leader_id_, have);
  crash_point("have.sent");
}

// No later cut is in order in this epoch, so once all results are here another epoch must begin.
void Machine::catch_up_when_cuts_were_ignored() {
  if (!cuts_ignored_ || ledger_.have() < known_round_) return;
  cuts_ignored_ = false;
  ask_for_view(config_.instance, "it was left behind by too many rounds");
}

void Machine::on(const Arrival& at, const Stable& stable) {
  if (at.from != leader_id_) return;
  ledger_.set_stable(stable.round);
  wake();
}

// --- the leader ----------------------------------------------------------------------------------

void Machine::lead(Time now) {
  const std::uint64_t stable = leader_->stable();
  if (stable > announced_stable_) {
    announced_stable_ = stable;
    lagging_since_ = kNever;
    broadcast(Stable{stable});
  }
  if (!pending_view_) {
    while (auto record = leader_->cut(own_settings().virtual_batch_size)) {
      const bool shared = shared_epoch_ == epoch_;
      broadcast(Cut{std::move(*record), shared ? ++shared_cuts_ : 0});
      crash_point("cut.sent");
    }
  } else if (stable == leader_->cut_round() && !std::exchange(moved_, true)) {
    broadcast(Move{pending_view_->epoch});
  }
  promise_snapshot(now);
  watch_members();
}

void Machine::session_lost(const Uid& instance) {
  if (view_->find(instance) != nullptr) sessions_lost_.insert(instance);
  if (!mutant("demote_whom_it_lost")) led_.demote.erase(instance);
}

void Machine::watch_members() {
  // A member whose result slots are full and that has applied nothing for too long becomes a
  // newcomer. Not if its HAVE may have been lost with a session: then another epoch begins, with
  // the rounds of each member.
  const std::vector<Uid> blocking = leader_->blocked_by(own_settings().virtual_batch_size);
  std::erase_if(blocking_, [&](const auto& item) {
    return std::ranges::find(blocking, item.first) == blocking.end();
  });
  for (const Uid& instance : blocking) {
    const std::uint64_t delivered = leader_->delivered(instance);
    Blocking& known = blocking_.try_emplace(instance, Blocking{awake_, delivered}).first->second;
    if (known.delivered != delivered) known = {awake_, delivered};
    if (awake_ < known.since + config_.member_stall) continue;
    known.since = awake_;
    if (sessions_lost_.contains(instance) && !mutant("demote_whom_it_lost")) {
      log(LogLevel::warning, name_of(instance) +
                                 " holds up the group: the session with it was lost, and the group "
                                 "has not changed its membership since");
      continue;
    }
    if (instance == config_.instance) {
      stalled_ = true;
    } else {
      led_.demote.insert(instance);
    }
    ask_for_view(instance, "its result slots are full, so it becomes a newcomer");
  }
  // Any member may cause a reduction that does not end: another epoch finds the members that
  // answer, and no member loses its state.
  const std::vector<Uid> lagging = leader_->without_oldest();
  if (lagging.empty()) lagging_since_ = kNever;
  if (!lagging.empty() && lagging_since_ == kNever) lagging_since_ = awake_;
  if (lagging.empty() || awake_ < lagging_since_ + config_.member_stall) return;
  lagging_since_ = awake_;
  log(LogLevel::warning, "round " + std::to_string(leader_->stable() + 1) +
                             " has had no result at " + group::joined(names_of(lagging)) + " for " +
                             in_seconds(config_.member_stall) +
                             ": the group begins a membership change");
  const bool self_first = lagging.front() == config_.instance && lagging.size() > 1;
  actions_.push_back(Demote{lagging[self_first ? 1 : 0]});
}

void Machine::ask_for_view(const Uid& instance, const std::string& reason) {
  log(LogLevel::warning, name_of(instance) + " holds up the group: " + reason);
  actions_.push_back(Demote{instance});
}

void Machine::on(const Arrival& at, const Checksum& checksum) {
  if (!leader_) return;
  auto differing = leader_->checksum(at.from, config_.instance, checksum);
  if (!differing.empty()) broadcast(Diverged{checksum.round, std::move(differing)});
}

void Machine::on(const Arrival& at, const Diverged& diverged) {
  if (at.from != leader_id_) return;
  // A later state is the leader's: differences from before it do not matter any more.
  const bool mine =
      std::ranges::find(diverged.instances, config_.instance) != diverged.instances.end();
  const bool here = mine && standing_ == Standing::complete && installed_ &&
                    diverged.round > snapshot_.version && leader_ == nullptr;
  actions_.push_back(Divergence{diverged.round, names_of(diverged.instances), here});
}

}  // namespace moolink::accumulate
