#include "accumulate/machine.h"

#include <algorithm>

#include "accumulate/hostile_messages.h"
#include "base/mutant.h"

namespace moolink::accumulate {
namespace {

// Kept for an epoch whose view has not arrived, at most backlog_bytes of them; more than that means
// a faulty peer.
constexpr std::size_t kEarlyMessages = 65536;
// How often a waiting machine looks, and so how much suspended time it can miss.
constexpr Duration kWatchInterval = milliseconds(250);

}  // namespace

Machine::Machine(Config config) : config_(std::move(config)), ledger_(config_.instance) {
  if (!config_.memory) config_.memory = std::make_shared<HeapAllocator>();
}

Machine::~Machine() = default;

// --- dispatch --------------------------------------------------------------------------------

void Machine::received(Time now, const Uid& from, std::uint8_t service,
                       const wire::Payload& payload) {
  if (service == kSnapshotService) {
    received_snapshot(now, from, payload);
  } else {
    handle(now, {from, wire::decode<Envelope>(payload.body), payload.parts, payload.bytes()});
  }
  settle(now);
}

void Machine::handle(Time now, Inbound inbound) {
  if (inbound.envelope.group != config_.group) return;
  const bool accept_old =
      mutant("accept_old_epoch_cut") && std::holds_alternative<Cut>(inbound.envelope.message);
  if (inbound.envelope.epoch < epoch_ && !accept_old) {
    actions_.push_back(StaleFrame{inbound.from, inbound.envelope.epoch});
    return;
  }
  if (inbound.envelope.epoch > epoch_ || !is_ready_for(inbound.envelope.message)) {
    keep_early(std::move(inbound));
    return;
  }
  if (phase_ == Phase::outside || view_->find(inbound.from) == nullptr) return;
  const Arrival arrival{now, inbound.from, inbound.parts};
  std::visit([&](const auto& message) { on(arrival, message); }, inbound.envelope.message);
}

// Messages of the change of epoch look after themselves; all others are for an active epoch.
bool Machine::is_ready_for(const Message& message) const {
  if (phase_ == Phase::active) return true;
  if (std::holds_alternative<Go>(message)) return phase_ == Phase::resuming && is_ready_;
  return std::holds_alternative<Flush>(message) || std::holds_alternative<Resume>(message) ||
         std::holds_alternative<Ready>(message) || std::holds_alternative<FetchResult>(message) ||
         std::holds_alternative<FetchedResult>(message);
}

void Machine::keep_early(Inbound inbound) {
  if (early_.size() >= kEarlyMessages || inbound.bytes > config_.backlog_bytes - early_bytes_) {
    return;
  }
  early_bytes_ += inbound.bytes;
  early_.push_back(std::move(inbound));
}

void Machine::replay_early() {
  auto early = std::exchange(early_, {});
  early_bytes_ = 0;
  std::erase_if(early, [this](const Inbound& inbound) {
    return inbound.envelope.epoch < epoch_ && !mutant("accept_old_epoch_cut");
  });
  loop_.insert(loop_.begin(), std::make_move_iterator(early.begin()),
               std::make_move_iterator(early.end()));
}

// A later event handles kept messages; its sender is not to blame for their faults.
void Machine::handle_kept(Time now, Inbound inbound) {
  const Uid from = inbound.from;
  try {
    handle(now, std::move(inbound));
  } catch (const Exception& e) {
    log(LogLevel::warning, "a message of " + name_of(from) + " is ignored: " + e.what());
  }
}

// After every event: this peer's messages to itself, and the work that they made due.
void Machine::settle(Time now) {
  do {
    while (!loop_.empty()) {
      Inbound inbound = std::move(loop_.front());
      loop_.pop_front();
      handle_kept(now, std::move(inbound));
    }
    progress(now);
  } while (!loop_.empty());
}

// Timeouts of other peers count only time in which this process was running: a process that was
// stopped finds their answers in its sockets only after it notices how late it is.
void Machine::advance_awake(Time now) {
  if (last_event_ != kNever) awake_ += std::min(now - last_event_, kWatchInterval);
  last_event_ = now;
}

bool Machine::is_watching() const {
  const bool differs = differs_since_ != kNever && !settings_refused_;
  if (phase_ == Phase::active) return !blocking_.empty() || lagging_since_ != kNever || differs;
  return phase_ != Phase::outside;
}

void Machine::progress(Time now) {
  advance_awake(now);
  enter_pending_when_due(now);
  if (phase_ == Phase::active) {
    resync_when_active();
    drop_refused_state_when_active();
    if (leader_) lead(now);
    bound_backlog();
    report_have();
    catch_up_when_cuts_were_ignored();
    request_state();
    watch_settings();
  } else if (phase_ != Phase::outside) {
    watch_flush();
  }
  watch_fetch(now);
}

void Machine::tick(Time now) {
  if (now >= fill_in_at_) {
    fill_in_at_ = kNever;
    wake();
  }
  settle(now);
}

Time Machine::next_deadline() const {
  Time next = std::min(pending_deadline_, fill_in_at_);
  if (fetch_) next = std::min(next, fetch_->deadline());
  if (is_watching()) next = std::min(next, last_event_ + kWatchInterval);
  if (leader_) next = std::min(next, leader_->promise_due().value_or(kNever));
  return next;
}

void Machine::send(const Uid& to, Message message, std::vector<Buffer> parts) {
  Envelope envelope{config_.group, epoch_, std::move(message)};
  if (to == config_.instance) {
    loop_.push_back({to, std::move(envelope), std::move(parts)});
    return;
  }
  lie_in(envelope.message);
  actions_.push_back(
      Send{to, name_of(to), kAccumulateService, {wire::encode(envelope), std::move(parts)}});
}

void Machine::send_snapshot(const Uid& to, decltype(SnapshotEnvelope::message) message,
                            std::vector<Buffer> parts) {
  lie_in(message);
  const SnapshotEnvelope envelope{config_.group, std::move(message)};
  actions_.push_back(
      Send{to, name_of(to), kSnapshotService, {wire::encode(envelope), std::move(parts)}});
}

const std::string& Machine::name_of(const Uid& instance) const {
  static const std::string kUnknown;  // gone from the view; only its instance matters
  const group::MemberInfo* member = view_->find(instance);
  return member == nullptr ? kUnknown : member->name;
}

std::vector<std::string> Machine::names_of(const std::vector<Uid>& instances) const {
  std::vector<std::string> names;
  for (const Uid& instance : instances) names.push_back(name_of(instance));
  return names;
}

void Machine::wake() {
  if (actions_.empty() || !std::holds_alternative<Wake>(actions_.back())) {
    actions_.push_back(Wake{});
  }
}

// --- the user's view -----------------------------------------------------------------------------

bool Machine::connected() const {
  return phase_ != Phase::outside && standing_ == Standing::complete && installed_ &&
         refused_.empty();
}

bool Machine::wants_gradients(Time now) const {
  const bool contributes =
      phase_ == Phase::active && connected() && keeps_up_ && config_.role != group::Role::observer;
  if (!contributes || wants_state_) return false;
  // Gradients are of parameters less than parallel_gradients rounds old: with 1, of the newest.
  const std::uint64_t under_way = known_round_ - std::min(known_round_, ledger_.delivered());
  if (under_way >= settings().parallel_gradients && !mutant("contribute_before_delivery")) {
    return false;
  }
  const std::int64_t uncut = ledger_.uncut_batch();
  if (uncut < share()) return true;
  // A share of another member is missing: fill in for it, at most to whole rounds of one's own.
  const Settings leaders = settings();
  const std::int64_t whole = leaders.virtual_batch_size * leaders.parallel_gradients;
  return uncut < whole && (fill_in_at_ == kNever || now >= fill_in_at_);
}

std::optional<Round> Machine::next_result() const {
  if (standing_ != Standing::complete || !installed_ || wants_state_) return {};
  const Ledger::Known* known = ledger_.next();
  if (known == nullptr) return {};
  // A promised snapshot is of this version: the user's state is taken before the next round is
  // applied.
  if (leader_ && leader_->promised() && !leader_->promised()->captured &&
      ledger_.delivered() == leader_->promised()->id.version &&
      !mutant("snapshot_of_wrong_version")) {
    return {};
  }
  // Waiting for STABLE costs a message; another copy for the user costs more on one host.
  const bool may_take = known->exclusive && (ledger_.stable() >= known->record.round ||
                                             mutant("give_away_before_stable"));
  if (known->exclusive && known->kept && !may_take) return {};
  return Round{known->record, known->result, may_take, known->times};
}

std::optional<std::string> Machine::leader() const {
  if (phase_ != Phase::active) return {};
  return name_of(leader_id_);
}

}  // namespace moolink::accumulate
