#include "accumulate/world.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "common/program.h"

namespace moolink::sim {

using accumulate::Machine;
using collective::Engine;
using group::Broker;
using group::Down;
using group::Member;

namespace {

constexpr const char* kGroup = "g";
constexpr Duration kForever = seconds(1000000);
constexpr Duration kEvictAfter = seconds(3);         // of the node below and of the group
constexpr Duration kToldWithin = milliseconds(100);  // after that, of a silence

}  // namespace

// --- events --------------------------------------------------------------------------------------

int World::add_process(std::string name) {
  processes_.push_back(std::make_unique<Process>());
  Process& process = *processes_.back();
  process.index = static_cast<int>(processes_.size()) - 1;
  process.name = std::move(name);
  return process.index;
}

void World::on(int index, Duration delay, std::function<void()> action) {
  const std::uint64_t incarnation = process(index).incarnation;
  simulation_.after(delay, [this, index, incarnation, action = std::move(action)]() mutable {
    run(index, incarnation, std::move(action));
  });
}

// A stopped process does nothing until it is continued, and then all at once, in order.
void World::run(int index, std::uint64_t incarnation, std::function<void()> action) {
  Process& process = this->process(index);
  if (!process.alive || process.incarnation != incarnation) return;
  if (simulation_.now() < process.frozen_until) {
    process.backlog.push_back(std::move(action));
    return;
  }
  action();
  pump(index);
}

Duration World::latency() {
  if (!calm_ && simulation_.random.chance(1, 25)) {
    return simulation_.between(milliseconds(1), milliseconds(80));
  }
  return simulation_.between(microseconds(30), setting_.slowest);
}

int World::index_of(const Uid& instance) const {
  for (const auto& process : processes_) {
    if (process->alive && process->instance == instance) return process->index;
  }
  return -1;
}

void World::deliver(int from, const Uid& to, int service, std::function<void(int)> action) {
  const int target = index_of(to);
  if (target < 0) return;
  const Uid sender = process(from).instance;
  Time& last = last_arrival_[{sender, to, service}];
  Time arrival = simulation_.now() + latency();
  if (cut(from, target)) {
    const Process& a = process(from);
    const Process& b = process(target);
    if ((a.cut_off_until > simulation_.now() && a.lossy) ||
        (b.cut_off_until > simulation_.now() && b.lossy)) {
      return;
    }
    arrival = std::max({arrival, a.cut_off_until + latency(), b.cut_off_until + latency()});
  }
  last = arrival = std::max(arrival, last);
  on(target, arrival - simulation_.now(), [this, target, to, sender, action] {
    // Sessions end with their instances.
    if (process(target).instance == to && index_of(sender) >= 0) action(target);
  });
}

// --- processes -----------------------------------------------------------------------------------

int World::add_peer(bool observer, std::uint64_t version) {
  const int index = add_process("p" + std::to_string(processes_.size()));
  start(index, observer, version);
  return index;
}

void World::start_broker() {
  Process& broker = process(kBroker);
  if (broker.alive) return;
  broker.alive = true;
  ++broker.incarnation;
  broker.instance = Uid::random(simulation_.random);
  broker.backlog.clear();
  broker.frozen_until = Time::min();
  broker.tick_at = kNever;
  group::BrokerConfig config;
  config.abandon_after = seconds(4);
  broker.broker = std::make_unique<Broker>(config, simulation_.random.next(), simulation_.now());
  simulation_.note("broker starts");
  for (const int peer : live())
    connect_broker(peer, simulation_.between(milliseconds(1), milliseconds(200)));
  schedule_tick(kBroker);
}

void World::start(int index, bool observer, std::uint64_t version) {
  Process& peer = process(index);
  if (peer.alive) return;
  peer.alive = true;
  ++peer.incarnation;
  peer.instance = Uid::random(simulation_.random);
  peer.disturbed = peer.leaving = false;
  peer.backlog.clear();
  peer.frozen_until = peer.cut_off_until = peer.user_away_until = Time::min();
  peer.tick_at = kNever;
  peer.crash_after = -1;
  peer.broker_instance = peer.lineage = {};
  peer.reductions.clear();

  group::MemberConfig member;
  member.group = kGroup;
  member.self.instance = peer.instance;
  member.self.name = peer.name;
  member.self.host_key = {2, static_cast<std::uint64_t>(1 + index / 2)};
  member.self.role = observer ? group::Role::observer : group::Role::member;
  member.stateful = true;
  peer.member = std::make_unique<Member>(member, simulation_.now());

  Engine::Config engine;
  engine.scope = kGroup;
  engine.self = peer.instance;
  peer.engine = std::make_unique<Engine>(std::move(engine));

  accumulate::Config machine;
  machine.group = kGroup;
  machine.instance = peer.instance;
  machine.name = peer.name;
  machine.role = member.self.role;
  // The leader's counts; a user who has set another one is told so after some seconds.
  peer.virtual_batch_size = setting_.virtual_batch_size;
  if (setting_.sizes_differ && simulation_.random.chance(1, 2)) {
    peer.virtual_batch_size = 1 + static_cast<std::int64_t>(simulation_.random.below(12));
  }
  machine.virtual_batch_size = peer.virtual_batch_size;
  machine.settings_timeout = kForever;
  machine.parallel_gradients = setting_.parallel_gradients;
  machine.bucket_bytes = setting_.elements * sizeof(std::int64_t);
  machine.share_wait = setting_.share_wait;
  machine.member_stall =
      seconds(4);  // above the time after which the silent are evicted, as by default
  machine.snapshot_timeout = milliseconds(500);
  machine.backlog_rounds = 40;
  machine.chunk_bytes = 512;
  peer.machine = std::make_unique<Machine>(machine);
  peer.machine->set_model_version(version);

  Learner::Habits habits;
  habits.observer = observer;
  habits.slots = setting_.parallel_gradients + 1;
  habits.parallel_gradients = setting_.parallel_gradients;
  habits.unwritten_percent = 30;
  peer.learner = std::make_unique<Learner>(registry_, peer.instance, habits, version);
  simulation_.note(peer.name + " starts");
  connect_broker(index, simulation_.between(milliseconds(1), milliseconds(100)));
  // A model is built between the group and its accumulator.
  peer.made = false;
  peer.view.reset();
  const bool late = !calm_ && simulation_.random.chance(1, 4);
  on(index, late ? simulation_.between(milliseconds(100), milliseconds(2000)) : Duration(0),
     [=, this] { make_machine(index); });
  schedule_tick(index);
}

void World::make_machine(int index) {
  Process& peer = process(index);
  peer.made = true;
  peer.member->hold_soft_views(true);
  simulation_.note(peer.name + "'s machine is made");
  if (peer.view) {
    ++coverage["machines made late"];
    peer.machine->view(simulation_.now(), std::exchange(peer.view, {}));
  }
  on(index, simulation_.between(milliseconds(1), milliseconds(300)),
     [=, this] { user_turn(index); });
}

void World::crash(int index) {
  Process& dead = process(index);
  if (!dead.alive) return;
  peace_ = false;
  simulation_.note(dead.name + " dies");
  ++coverage[index == kBroker ? "broker crashes" : "crashes"];
  dead.alive = false;
  for (const auto& other : processes_) {
    if (!other->alive) continue;
    const bool proof = simulation_.random.chance(85, 100);
    tell_down(other->index, index, proof ? Down::dead : Down::unreachable,
              proof ? simulation_.between(milliseconds(1), milliseconds(30))
                    : kEvictAfter + simulation_.between(Duration(0), milliseconds(100)));
  }
}

void World::leave(int index) {
  Process& peer = process(index);
  if (!peer.alive || simulation_.now() < peer.frozen_until) return;
  peace_ = false;
  simulation_.note(peer.name + " leaves");
  peer.disturbed = peer.leaving = true;
  peer.member->leave(simulation_.now());
  pump(index);
  if (peer.alive)
    on(index, simulation_.between(Duration(0), milliseconds(50)), [=, this] { crash(index); });
}

void World::freeze(int index, Duration duration) {
  Process& peer = process(index);
  if (!peer.alive) return;
  peace_ = false;
  simulation_.note(peer.name + " is stopped");
  peer.disturbed = true;
  peer.frozen_until = std::max(peer.frozen_until, simulation_.now() + duration);
  simulation_.at(peer.frozen_until, [this, index, incarnation = peer.incarnation] {
    Process& woken = process(index);
    if (simulation_.now() < woken.frozen_until) return;
    for (auto& action : std::exchange(woken.backlog, {}))
      run(index, incarnation, std::move(action));
  });
  silence(index, duration);
}

void World::cut_off(int index, Duration duration) {
  Process& peer = process(index);
  if (!peer.alive) return;
  peace_ = false;
  simulation_.note(peer.name + " is cut off");
  peer.disturbed = true;
  // Sessions that lose messages are lost: silence() tells all in that time.
  const bool loses = duration > kEvictAfter && simulation_.random.chance(1, 2);
  peer.lossy = loses && duration > kEvictAfter + kToldWithin;
  peer.cut_off_until = std::max(peer.cut_off_until, simulation_.now() + duration);
  silence(index, duration);
}

// What the nodes make of a peer of which nothing is heard, and it of them.
void World::silence(int index, Duration duration) {
  if (duration <= kEvictAfter) return;
  const Uid instance = process(index).instance;
  simulation_.after(kEvictAfter + simulation_.between(Duration(0), kToldWithin), [=, this] {
    const Process& peer = process(index);
    const Time until = std::max(peer.frozen_until, peer.cut_off_until);
    if (peer.instance != instance || until <= simulation_.now()) return;
    const Duration left = until - simulation_.now();
    for (const auto& other : processes_) {
      if (!other->alive || other->index == index) continue;
      tell_down(other->index, index, Down::unreachable, Duration(0));
      tell_up(other->index, index, left + simulation_.between(milliseconds(1), milliseconds(50)));
      if (peer.cut_off_until <= simulation_.now()) continue;
      tell_down(index, other->index, Down::unreachable, Duration(0));
      tell_up(index, other->index, left + simulation_.between(milliseconds(1), milliseconds(50)));
    }
  });
}

void World::send_user_away(int index, Duration duration) {
  Process& peer = process(index);
  if (!peer.alive) return;
  peace_ = false;
  simulation_.note(peer.name + "'s user is away");
  if (duration > seconds(1)) peer.disturbed = true;
  peer.user_away_until = std::max(peer.user_away_until, simulation_.now() + duration);
}

void World::heal() {
  calm_ = true;
  setting_.slowest = milliseconds(2);
  for (const auto& process : processes_) process->crash_after = -1;
}

std::vector<int> World::live() const {
  std::vector<int> live;
  for (const auto& process : processes_) {
    if (process->index != kBroker && process->alive) live.push_back(process->index);
  }
  return live;
}

// --- what the node below tells -------------------------------------------------------------------

void World::connect_broker(int index, Duration delay) {
  on(index, delay, [this, index] {
    Process& peer = process(index);
    const Process& broker = process(kBroker);
    if (!broker.alive || peer.broker_instance == broker.instance) return;
    if (cut(index, kBroker)) {
      return connect_broker(index, simulation_.between(milliseconds(50), milliseconds(200)));
    }
    peer.broker_instance = broker.instance;
    peer.member->broker_up(simulation_.now(), broker.instance);
  });
}

void World::tell_down(int observer, int lost, Down how, Duration delay) {
  const Uid instance = process(lost).instance;
  on(observer, delay, [=, this] {
    Process& process = this->process(observer);
    if (observer == kBroker) {
      process.broker->peer_down(simulation_.now(), instance, how);
    } else if (lost != kBroker) {
      process.machine->session_lost(instance);
      process.member->peer_down(simulation_.now(), instance, how);
    } else if (process.broker_instance == instance) {
      process.broker_instance = {};
      process.member->broker_down(simulation_.now());
      connect_broker(observer, simulation_.between(milliseconds(10), milliseconds(200)));
    }
  });
}

void World::tell_up(int observer, int found, Duration delay) {
  const Uid instance = process(found).instance;
  on(observer, delay, [=, this] {
    const Process& other = process(found);
    if (!other.alive || other.instance != instance || observer == kBroker) return;
    if (found == kBroker) {
      connect_broker(observer, milliseconds(10));
    } else {
      process(observer).member->peer_up(simulation_.now(), instance);
    }
  });
}

// --- driving the machines
// --------------------------------------------------------------------------

void World::schedule_tick(int index) {
  Process& process = this->process(index);
  Time due = kNever;
  if (process.broker) due = process.broker->next_deadline();
  if (process.member) {
    due = process.member->next_deadline();
    if (process.made) due = std::min(due, process.machine->next_deadline());
  }
  if (due == kNever || !process.alive) return;
  const Time time = std::max(simulation_.now(), due) + microseconds(500);
  if (process.tick_at > simulation_.now() && process.tick_at <= time) return;
  process.tick_at = time;
  on(index, time - simulation_.now(), [this, index, time] {
    Process& ticking = this->process(index);
    if (ticking.tick_at != time) return;  // a later plan replaced this one
    ticking.tick_at = kNever;
    if (ticking.broker) return ticking.broker->tick(simulation_.now());
    ticking.member->tick(simulation_.now());
    if (ticking.made) ticking.machine->tick(simulation_.now());
  });
}

void World::user_turn(int index) {
  Process& peer = process(index);
  if (simulation_.now() >= peer.user_away_until) {
    peer.learner->update(simulation_.now(), *peer.machine, simulation_.random, contributing_,
                         calm_);
    peer.engine->inputs_written();
    if (peer.learner->resynced()) peer.disturbed = true;
    if (peer.learner->withdrew()) peace_ = false;
  }
  on(index, simulation_.between(milliseconds(5), milliseconds(30)),
     [=, this] { user_turn(index); });
}

void World::pump(int index) {
  Process& process = this->process(index);
  if (process.broker) {
    do_broker(process);
  } else {
    // Each machine's actions may give another one something to do.
    for (bool busy = true; busy && process.alive;) busy = pump_once(process);
  }
  schedule_tick(index);
}

bool World::pump_once(Process& process) {
  if (process.machine->is_leader()) {
    registry_.led(process.machine->epoch(), process.virtual_batch_size);
  }
  auto machine_actions = process.machine->take_actions();
  auto member_actions = process.member->drain();
  auto engine_actions = process.engine->take_actions();
  const bool busy = !machine_actions.empty() || !member_actions.empty() || !engine_actions.empty();
  for (const auto& action : machine_actions) {
    if (process.alive) perform(process, action);
  }
  for (const auto& action : member_actions) {
    if (process.alive) perform(process, action);
  }
  for (const auto& action : engine_actions) {
    if (process.alive) perform(process, action);
  }
  return busy;
}

}  // namespace moolink::sim
