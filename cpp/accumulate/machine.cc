#include "accumulate/machine.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>
#include <variant>

#include "base/names.h"

namespace moolink::accumulate {

Machine::Machine(Config config)
    : config_(std::move(config)),
      epoch_(config_.instance),
      inbox_(config_.backlog_bytes),
      outbox_(config_.group, epoch_, inbox_),
      ledger_(config_.instance),
      settings_(config_, epoch_, clock_, outbox_),
      rounds_(config_, epoch_, settings_, ledger_, model_, outbox_),
      snapshots_(config_, epoch_, outbox_),
      transfer_(config_, epoch_, clock_, ledger_, model_, snapshots_, outbox_),
      leadership_(config_, epoch_, clock_, settings_, ledger_, model_, snapshots_, outbox_),
      change_(config_, clock_, epoch_, outbox_),
      pending_(config_.soft_view_wait) {
  if (!config_.memory) config_.memory = std::make_shared<HeapAllocator>();
}

// --- messages ------------------------------------------------------------------------------------

void Machine::received(Time now, const Uid& from, std::uint8_t service,
                       const wire::Payload& payload) {
  if (service == kSnapshotService) {
    const auto envelope = wire::decode<SnapshotEnvelope>(payload.body);
    if (envelope.group == config_.group) {
      transfer_.received(now, from, envelope.message, payload.parts);
    }
  } else {
    handle(now, {from, wire::decode<Envelope>(payload.body), payload.parts, payload.bytes()});
  }
  settle(now);
}

void Machine::handle(Time now, Inbound inbound) {
  const Envelope& envelope = inbound.envelope;
  if (envelope.group != config_.group) return;
  if (envelope.epoch < epoch_.number()) {
    return outbox_.act(StaleFrame{inbound.from, envelope.epoch});
  }
  if (envelope.epoch > epoch_.number() || !is_ready_for(envelope.message)) {
    return inbox_.keep_early(std::move(inbound));
  }
  if (epoch_.is_outside() || epoch_.view().find(inbound.from) == nullptr) return;
  const Arrival arrival{now, inbound.from, inbound.parts};
  std::visit([&](const auto& message) { on(arrival, message); }, envelope.message);
}

// Messages of the change of epoch look after themselves; all others are for an active epoch.
bool Machine::is_ready_for(const Message& message) const {
  if (epoch_.is_active()) return true;
  if (std::holds_alternative<Go>(message)) {
    return epoch_.phase() == Epoch::Phase::resuming && change_.is_ready();
  }
  return std::holds_alternative<Flush>(message) || std::holds_alternative<Resume>(message) ||
         std::holds_alternative<Ready>(message) || std::holds_alternative<FetchResult>(message) ||
         std::holds_alternative<FetchedResult>(message);
}

// A later event handles messages that waited; their sender is not to blame for that event's fault.
void Machine::handle_waiting(Time now, Inbound inbound) {
  const Uid from = inbound.from;
  try {
    handle(now, std::move(inbound));
  } catch (const Exception& e) {
    outbox_.log(LogLevel::warning,
                "a message of " + epoch_.name_of(from) + " is ignored: " + e.what());
  }
}

void Machine::on(const Arrival& at, const Cut& cut) {
  // A user that waits for the result is not woken before it is here.
  if (rounds_.cut(at.now, at.from, cut) && wants_gradients(at.now)) outbox_.wake();
}

void Machine::on(const Arrival& at, const Settings& settings) {
  if (settings_.learn(at.from, settings) && wants_gradients(at.now)) outbox_.wake();
}

void Machine::on(const Arrival& at, const FetchedResult& got) {
  if (epoch_.phase() != Epoch::Phase::resuming) return;
  if (!rounds_.fetched(at.now, got.round, at.parts)) return;
  change_.progressed();
  ready_when_complete();
}

// --- due work ------------------------------------------------------------------------------------

// After every event: this peer's messages to itself, and the work that they made due.
void Machine::settle(Time now) {
  do {
    while (!inbox_.empty()) handle_waiting(now, inbox_.pop());
    progress(now);
  } while (!inbox_.empty());
}

void Machine::progress(Time now) {
  clock_.advance(now);
  if (auto next = pending_.due(now)) enter(std::move(next));
  if (epoch_.is_active()) {
    transfer_.start_over_when_wanted();
    leadership_.lead(now, pending_.epoch());
    transfer_.bound_backlog();
    rounds_.report_have();
    rounds_.catch_up_when_cuts_were_ignored();
    transfer_.request_state();
    settings_.watch();
  } else if (!epoch_.is_outside()) {
    if (change_.is_flush_due()) send_flush();
    change_.watch();
  }
  transfer_.watch_fetch(now);
}

void Machine::tick(Time now) {
  rounds_.tick(now);
  settle(now);
}

bool Machine::is_watching() const {
  if (epoch_.is_active()) return leadership_.is_watching() || settings_.is_watching();
  return !epoch_.is_outside();
}

Time Machine::next_deadline() const {
  const Time next = std::min({pending_.deadline(), rounds_.next_deadline(),
                              snapshots_.next_deadline(), leadership_.next_deadline()});
  return is_watching() ? std::min(next, clock_.next_event()) : next;
}

// --- from a view to an active epoch --------------------------------------------------------------

void Machine::view(Time now, const group::SharedView& view) {
  const std::uint64_t newest = std::max(epoch_.number(), pending_.epoch());
  if (view->epoch <= newest || view->find(config_.instance) == nullptr) return;
  if (view->soft && epoch_.is_active()) {
    pending_.wait(now, view);
  } else {
    enter(view);
  }
  settle(now);
}

void Machine::evicted(Time now) {
  if (epoch_.is_outside()) return;
  leave_epoch();
  epoch_.leave();
  outbox_.wake();
  settle(now);
}

// Nothing of the old epoch is applied from here on; FLUSH carries the facts that only its leader
// knows.
void Machine::leave_epoch() {
  leadership_.leave_epoch();
  settings_.leave_epoch();
  pending_.clear();
  outbox_.act(EnterEpoch{std::make_shared<const collective::EpochMembers>()});
}

void Machine::enter(group::SharedView view) {
  leave_epoch();
  change_.enter(std::move(view));
  transfer_.enter_epoch();
  send_flush();
  inbox_.replay_early(epoch_.number());
}

void Machine::send_flush() {
  if (epoch_.coordinator() != nullptr) return change_.flush(facts());
  if (!model_.is_stateless() || config_.role != group::Role::observer || !transfer_.had_state()) {
    return;
  }
  outbox_.log(LogLevel::warning,
              "the members left before this observer got the state anew: it waits for a member");
}

Flush Machine::facts() const {
  Flush flush;
  flush.status = transfer_.status();
  flush.version = model_.version();
  flush.have = ledger_.have();
  flush.snapshot = model_.snapshot();
  flush.holds = snapshots_.held();
  for (const auto& [round, known] : ledger_.known()) {
    flush.rounds.push_back({known.record, known.kept});
  }
  flush.layout = config_.layout;
  flush.bucket_bytes = config_.bucket_bytes;
  flush.layout_text = config_.layout_text;
  change_.add_facts(flush);
  leadership_.add_facts(flush);
  return flush;
}

void Machine::on(const Arrival& at, const Resume& resume) {
  if (!change_.accepts(at.from, resume, ledger_.have())) return;
  // RESUME names the version that FLUSH had: the state installed since then would be renumbered.
  const bool is_outdated = resume.fresh && resume.leader == config_.instance &&
                           transfer_.has_installed_since_flush() &&
                           resume.round != model_.version();
  if (is_outdated) {
    return outbox_.ask_for_view(config_.instance,
                                "its user installed a state during the membership change");
  }
  const auto mine = std::ranges::find(resume.members, config_.instance, &MemberStatus::instance);
  if (mine == resume.members.end()) return;
  change_.carry_out(resume, *mine);
  carry_out(at.now, *mine);
  ready_when_complete();
}

void Machine::carry_out(Time now, const MemberStatus& mine) {
  const Resume& resume = change_.resume();
  snapshots_.keep_only(resume.snapshots);
  if (mine.status == StateStatus::stateless || resume.fresh) {
    change_.leave_history();
    transfer_.leave_history(resume.round);
  }
  if (mine.status == StateStatus::stateless) return;
  if (resume.fresh) return begin_history(resume.round);
  // The snapshot may have been completed since FLUSH; that only helps.
  rounds_.resume(now, resume);
  for (const SnapshotHolders& snapshot : resume.snapshots) {
    snapshots_.set_parents(now, snapshot.id, snapshot.holders);
  }
}

// Rounds are numbered from the version in FLUSH; the user may have set another one since.
void Machine::begin_history(std::uint64_t version) {
  change_.found_history();
  ledger_.reset(version, true);
  if (model_.version() != version) {
    outbox_.log(LogLevel::warning, "the group begins at version " + std::to_string(version) +
                                       ": this model's version was set to " +
                                       std::to_string(model_.version()) + " too late");
  }
  model_.begin_history(version);
}

void Machine::ready_when_complete() {
  if (change_.is_ready() || !ledger_.missing(change_.resume().round).empty()) return;
  change_.ready();
  inbox_.replay_early(epoch_.number());
}

void Machine::activate(const Go& go) {
  change_.activate();
  const Resume& resume = change_.resume();
  const collective::SharedMembers members = change_.members();
  transfer_.activate();
  rounds_.activate(resume, members);
  if (epoch_.takes_part()) outbox_.act(EnterEpoch{members});
  leadership_.activate(resume);
  if (!go.lost.empty()) outbox_.act(Lost{go.lost});
  outbox_.act(HasState{model_.is_complete()});
  for (const MemberStatus& member : resume.members) {
    if (member.instance == config_.instance && member.status == StateStatus::pending &&
        model_.is_complete()) {
      // It arrived during the change.
      outbox_.send(epoch_.leader(), SnapshotComplete{member.snapshot});
    }
  }
  inbox_.replay_early(epoch_.number());
  outbox_.wake();
}

// --- reductions ----------------------------------------------------------------------------------

void Machine::reduced(Time now, std::uint64_t epoch, std::uint64_t round, Buffer result,
                      bool exclusive) {
  if (!rounds_.reduced(now, epoch, round, std::move(result), exclusive)) return;
  if (next_result()) outbox_.wake();  // else STABLE will
  settle(now);
}

// --- the user ------------------------------------------------------------------------------------

void Machine::user_active(Time now) {
  transfer_.user_active();
  settle(now);
}

void Machine::set_model_version(std::uint64_t version) {
  if (model_.is_complete() && version != model_.version()) {
    throw Exception(ErrorCode::invalid_argument,
                    "group '" + joined_names_text(config_.group) + "' is at version " +
                        std::to_string(model_.version()) +
                        " already: a model's version is set before connect()");
  }
  model_.set_version(version);
}

void Machine::set_parallel_gradients(std::uint32_t rounds) {
  settings_.set_parallel_gradients(rounds);
  leadership_.set_parallel_gradients(rounds);
}

std::uint64_t Machine::offer(Time now, Buffer bucket, std::int64_t batch, Counters counters,
                             std::shared_ptr<const Progress> progress) {
  const std::uint64_t k =
      rounds_.offer(now, std::move(bucket), batch, std::move(counters), std::move(progress));
  if (model_.is_installed()) settle(now);
  return k;
}

void Machine::written(Time now, std::uint64_t k) {
  rounds_.written(k);
  settle(now);
}

void Machine::withdraw(Time now, std::uint64_t k) {
  rounds_.withdraw(k);
  settle(now);
}

void Machine::delivered(Time now, std::uint64_t r) {
  model_.set_version(r);
  if (model_.is_complete()) ledger_.set_delivered(r);
  settle(now);
}

// --- the user's view -----------------------------------------------------------------------------

std::optional<std::string> Machine::leader() const {
  if (!epoch_.is_active()) return {};
  return epoch_.name_of(epoch_.leader());
}

std::vector<std::string> Machine::waiting_for() const {
  if (epoch_.is_outside()) return {};
  return epoch_.names_of(epoch_.is_active() ? leadership_.waiting_for() : change_.missing());
}

std::string Machine::explain() const {
  if (epoch_.is_outside() || !epoch_.takes_part()) return {};
  if (!epoch_.is_active()) return change_.explain();
  const std::string leader = "'" + epoch_.name_of(epoch_.leader()) + "'";
  if (!connected()) {
    return "the model's state from the leader " + leader +
           ": its loop must call update(), and set_state() when wants_state() is true";
  }
  if (is_leader()) return leadership_.explain();
  return "round " + std::to_string(ledger_.delivered() + 1) + " of the leader " + leader +
         ", whose log says whom it waits for";
}

}  // namespace moolink::accumulate
