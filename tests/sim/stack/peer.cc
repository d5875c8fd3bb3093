// What rides on the node of a simulated process: group, rounds, accumulator and its user, or the
// broker.

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "common/program.h"
#include "group/messages.h"
#include "stack/process.h"
#include "stack/world.h"

namespace moolink::sim {
namespace {

constexpr const char* kGroup = "g";

}  // namespace

// --- the user ------------------------------------------------------------------------------------

void Process::make_group() {
  const Scenario& scenario = world_->scenario;
  Random& random = world_->simulation.random;
  const bool observer = scenario.roles[static_cast<std::size_t>(number) - 1] == 'O';

  group::MemberConfig member;
  member.group = kGroup;
  member.self.instance = instance;
  member.self.name = name;
  member.self.host_key = host_key();
  member_ = std::make_unique<Member>(member, now());

  Engine::Config engine;
  engine.scope = kGroup;
  engine.self = instance;
  engine_ = std::make_unique<Engine>(std::move(engine));

  accumulate::Config machine;
  machine.group = kGroup;
  machine.instance = instance;
  machine.name = name;
  machine.role = observer ? group::Role::observer : group::Role::member;
  machine.virtual_batch_size = scenario.batch;
  machine.parallel_gradients = scenario.parallel;
  machine.bucket_bytes = scenario.elements * sizeof(std::int64_t);
  machine.share_wait = milliseconds(scenario.share_wait);
  machine.member_stall = seconds(4);  // above evict_after, as by default
  machine.snapshot_timeout = milliseconds(500);
  machine.backlog_rounds = 40;
  machine.chunk_bytes = 512;
  machine_ = std::make_unique<Machine>(machine);
  const std::uint64_t version = random.chance(1, 3) ? random.below(5) : 0;  // of a checkpoint
  machine_->set_model_version(version);

  Learner::Habits habits;
  habits.observer = observer;
  habits.slots = scenario.parallel + 1;
  habits.parallel_gradients = scenario.parallel;
  learner_ = std::make_unique<Learner>(world_->registry, instance, habits, version);

  // A model is built between the group and its accumulator.
  const bool late = scenario.late && random.chance(1, 2) && !world_->calm();
  if (!late) return make_machine();
  later(world_->simulation.between(milliseconds(100), milliseconds(2000)),
        [this] { make_machine(); });
}

void Process::make_machine() {
  made_ = true;
  note("makes its accumulator");
  member_->share_state(now(),
                       learner_->habits().observer ? group::Role::observer : group::Role::member);
  member_->hold_soft_views(true);
  if (!member_->view()->empty()) {
    ++coverage["machines made late"];
    machine_->view(now(), member_->view());
  }
  later(world_->simulation.between(milliseconds(1), milliseconds(300)), [this] { user_turn(); });
}

void Process::user_turn() {
  Simulation& simulation = world_->simulation;
  if (leaving_) return;
  if (now() >= user_away_until_) {
    learner_->update(now(), *machine_, simulation.random, world_->contributing(),
                     world_->calm() || world_->scenario.pause > 0);
    if (learner_->resynced()) disturbed = true;
    note_round();
  }
  later(simulation.between(milliseconds(10), milliseconds(50)), [this] { user_turn(); });
}

void Process::watch_pauses() {
  last_round_ = now();
  applied_ = learner_->applied();
}

void Process::note_round() {
  if (last_round_ == kNever) return;
  longest_pause_ = std::max(longest_pause_, now() - last_round_);
  if (learner_->applied() == applied_) return;
  applied_ = learner_->applied();
  last_round_ = now();
}

void Process::leave() {
  if (leaving_ || !awake()) return;
  note("leaves");
  leaving_ = disturbed = true;
  member_->leave(now());
  act();
  later(world_->simulation.between(Duration(0), milliseconds(50)), [this] { die(false); });
}

void Process::send_user_away(Duration duration) {
  user_away_until_ = std::max(user_away_until_, now() + duration);
}

std::string Process::waiting_for() const {
  std::string text = name + " in epoch " + std::to_string(machine_->epoch()) + " at version " +
                     std::to_string(learner_->version()) + " waits for";
  for (const std::string& other : machine_->waiting_for()) text += " " + other;
  if (machine_->wants_state()) text += " set_state";
  return text + " " + member_->waiting_for();
}

// --- messages ------------------------------------------------------------------------------------

void Process::service_message(rpc::ServiceMessage& action) {
  const Uid& from = action.from;
  switch (action.service) {
    case rpc::Service::group: {
      const bool to_broker = group::recipient_of(action.payload.body.span()).broker;
      if (to_broker && is_broker()) broker_->received(now(), from, action.payload.body.span());
      if (!to_broker && !is_broker()) member_->received(now(), from, action.payload.body.span());
      return;
    }
    case rpc::Service::collective:
      if (made_) engine_->received(from, action.payload);
      return;
    case rpc::Service::accumulate:
    case rpc::Service::snapshot:
      if (made_) {
        machine_->received(now(), from, static_cast<std::uint8_t>(action.service), action.payload);
      }
      return;
    case rpc::Service::directory:
    case rpc::Service::namesakes:
      require(false, "a message of the directory left the node");
  }
}

bool Process::act_on_broker() {
  auto actions = broker_->drain();
  for (auto& action : actions) {
    if (auto* message = std::get_if<Broker::Send>(&action)) {
      send(message->instance, message->name, rpc::Service::group, {message->bytes, {}});
    } else if (auto* log = std::get_if<Broker::Log>(&action)) {
      note(log->text);
    }
  }
  return !actions.empty();
}

bool Process::act_on_peer() {
  auto member_actions = member_->drain();
  auto machine_actions = machine_->take_actions();
  auto engine_actions = engine_->take_actions();
  for (auto& action : member_actions) perform(action);
  for (auto& action : machine_actions) perform(action);
  for (auto& action : engine_actions) perform(action);
  return !member_actions.empty() || !machine_actions.empty() || !engine_actions.empty();
}

void Process::perform(Member::Action& action) {
  if (auto* announce = std::get_if<Member::SendToBroker>(&action)) {
    node_.send_service_to(now(), {}, "broker", rpc::Service::group, {announce->bytes, {}});
  } else if (auto* relay = std::get_if<Member::SendToMember>(&action)) {
    send(relay->instance, relay->name, rpc::Service::group, {relay->bytes, {}});
  } else if (auto* made = std::get_if<Member::NewView>(&action)) {
    note("gets " + group::describe(*made->view));
    check_view(*made->view);
    ++coverage[made->view->soft ? "soft views" : "hard views"];
    if (made_) machine_->view(now(), made->view);
  } else if (std::holds_alternative<Member::Evicted>(action)) {
    note("was evicted");
    ++coverage["evictions"];
    require(!world_->steady(), name + " was evicted though nothing befell it");
    disturbed = true;
    if (made_) machine_->evicted(now());
  }
}

void Process::check_view(const group::View& view) {
  require(view.epoch > last_epoch_, name + " goes back to " + group::describe(view));
  last_epoch_ = view.epoch;
  // A young lineage yields to an older one: what was trained in it is lost.
  const Uid before = std::exchange(lineage_, view.lineage);
  if (before && before != view.lineage) disturbed = true;
  require(view.find(instance) != nullptr, name + " accepts a view without itself");
  world_->check_view(view);
}

void Process::perform(Engine::Action& action) {
  if (auto* message = std::get_if<Engine::Send>(&action)) {
    send(message->instance, message->name, rpc::Service::collective, std::move(message->payload));
  } else if (auto* sum = std::get_if<Engine::Sum>(&action)) {
    // Arithmetic runs on another thread; whatever happens meanwhile, it comes to its end.
    later(world_->simulation.between(Duration(0), milliseconds(1)), [this, sum = *sum] {
      collective::run(sum.work);
      engine_->summed(sum.op, sum.run, sum.id);
    });
  } else if (auto* done = std::get_if<Engine::Done>(&action)) {
    reduced(*done);
  }
}

void Process::reduced(Engine::Done& done) {
  const auto [epoch, round] = reductions_.at(done.op);
  reductions_.erase(done.op);
  if (done.error) {
    return require(done.error.code == ErrorCode::group_changed, done.error.message);
  }
  // In every other epoch as if through a segment: into memory that is this process's alone.
  const bool exclusive = epoch % 2 == 0;
  Buffer result = done.tensor;
  if (exclusive) {
    const MutableBuffer own = HeapAllocator().allocate(result.size());
    std::memcpy(own.data(), result.data(), result.size());
    result = own;
  }
  machine_->reduced(now(), epoch, round, result, exclusive);
}

void Process::perform(accumulate::Action& action) {
  if (auto* message = std::get_if<accumulate::Send>(&action)) {
    send(message->instance, message->name, static_cast<rpc::Service>(message->service),
         std::move(message->payload));
  } else if (auto* epoch = std::get_if<accumulate::EnterEpoch>(&action)) {
    enter(*epoch);
  } else if (auto* reduction = std::get_if<accumulate::Reduce>(&action)) {
    reduce(*reduction);
  } else if (auto* dropped = std::get_if<accumulate::Dropped>(&action)) {
    require(disturbed, name + " dropped contributions though nothing befell it");
    ++coverage["drops"];
    learner_->dropped(dropped->k);
  } else if (auto* lost = std::get_if<accumulate::Lost>(&action)) {
    ++coverage["losses named"];
    for (const auto& contribution : lost->contributions) {
      const Process* owner = world_->find(contribution.instance);
      require(owner == nullptr || !owner->alive() || owner->disturbed,
              "a living peer's contribution is lost");
      world_->lost[{contribution.instance, contribution.k}][instance] = learner_->installed();
    }
  } else if (auto* whom = std::get_if<accumulate::Demote>(&action)) {
    demote(*whom);
  } else if (auto* activate = std::get_if<accumulate::Activate>(&action)) {
    member_->activate(now(), activate->epoch);
  } else if (auto* has = std::get_if<accumulate::HasState>(&action)) {
    member_->set_has_state(now(), has->has_state);
  } else if (auto* stale = std::get_if<accumulate::StaleFrame>(&action)) {
    const group::MemberInfo* from = member_->view()->find(stale->instance);
    member_->check_frame(now(), stale->instance, from == nullptr ? "" : from->name, stale->epoch);
  } else if (auto* failed = std::get_if<accumulate::Failed>(&action)) {
    require(false, name + " failed: " + failed->error.message);
  } else if (auto* log = std::get_if<accumulate::Log>(&action)) {
    note(log->text);
  }
}

void Process::enter(const accumulate::EnterEpoch& enter) {
  learner_->entered_epoch();
  if (enter.members->epoch != 0) {
    ++coverage["epochs entered"];
    note("enters epoch " + std::to_string(enter.members->epoch));
  }
  Error changed;
  changed.code = ErrorCode::group_changed;
  engine_->set_members(enter.members, changed);
}

void Process::reduce(accumulate::Reduce& reduction) {
  // The leader waits for those who keep up: results that wait never exceed their slots, but for
  // cuts that were under way when a member caught up.
  const std::uint64_t bound = 2 * world_->scenario.parallel + 1;
  learner_->knows(reduction.epoch, reduction.round);
  require(!learner_->contributed_in_epoch() || !machine_->connected() ||
              reduction.round <= learner_->version() + bound,
          name + " has more results waiting than slots");
  ++coverage["reductions"];
  collective::OpSpec spec;
  spec.dtype = tensor::DType::int64;
  spec.shape = {static_cast<std::int64_t>(world_->scenario.elements)};
  spec.contributors = std::move(reduction.contributors);
  Engine::Options options;
  options.number = reduction.round;
  const auto op =
      engine_->start("round", std::move(spec), std::move(reduction.inputs), std::move(options));
  reductions_[op] = {reduction.epoch, reduction.round};
}

void Process::demote(const accumulate::Demote& demote) {
  ++coverage["demotions asked for"];
  const Process* whom = world_->find(demote.instance);
  const bool observer = whom != nullptr && whom->learner_ && whom->learner_->habits().observer;
  const std::string named = whom != nullptr ? whom->name : "a peer that is gone";
  require(!world_->peace() || observer, name + " has " + named + " demoted without a fault");
  note("asks to demote " + named);
  member_->ask_demotion(now(), demote.instance);
}

}  // namespace moolink::sim
