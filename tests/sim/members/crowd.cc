#include "members/crowd.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <span>
#include <utility>
#include <variant>

#include "common/program.h"

namespace moolink::sim {

using accumulate::Machine;
using collective::Engine;
using group::Broker;
using group::Member;

namespace {

constexpr const char* kGroup = "g";
constexpr std::size_t kMembersOfAHost = 8;
constexpr std::size_t kMostEvents = 2'000'000'000;
constexpr Duration kTimeout = seconds(120);  // of simulated time

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

}  // namespace

Crowd::Crowd(int members, std::size_t elements, std::uint64_t seed)
    : simulation_(seed, false), elements_(elements) {
  const MutableBuffer bucket = HeapAllocator().allocate(elements * sizeof(std::int64_t));
  std::memset(bucket.data(), 0, bucket.size());
  bucket_ = bucket;
  broker_.instance = Uid::random(simulation_.random);
  broker_.name = "broker";
  broker_.broker =
      std::make_unique<Broker>(group::BrokerConfig{}, simulation_.random.next(), simulation_.now());
  by_instance_[broker_.instance] = &broker_;
  arm(broker_);
  for (int i = 0; i < members; ++i) add_peer();
}

void Crowd::add_peer() {
  peers_.push_back(std::make_unique<Process>());
  Process& peer = *peers_.back();
  peer.instance = Uid::random(simulation_.random);
  peer.name = "p" + std::to_string(peers_.size());
  by_instance_[peer.instance] = &peer;
  group::MemberConfig member;
  member.group = kGroup;
  member.self.instance = peer.instance;
  member.self.name = peer.name;
  member.self.host_key = {2, static_cast<std::uint64_t>(peers_.size() / kMembersOfAHost + 1)};
  member.stateful = true;
  peer.member = std::make_unique<Member>(member, simulation_.now());
  peer.member->hold_soft_views(true);
  Engine::Config engine;
  engine.scope = kGroup;
  engine.self = peer.instance;
  peer.engine = std::make_unique<Engine>(std::move(engine));
  accumulate::Config machine;
  machine.group = kGroup;
  machine.instance = peer.instance;
  machine.name = peer.name;
  machine.virtual_batch_size = static_cast<std::int64_t>(peers_.size());
  machine.bucket_bytes = bucket_.size();
  machine.share_wait = seconds(3600);  // every round has one contribution of each
  peer.machine = std::make_unique<Machine>(machine);
  on(peer, simulation_.between(Duration(0), milliseconds(200)), [this, &peer] {
    peer.member->broker_up(simulation_.now(), broker_.instance);
    peer.machine->user_active(simulation_.now());
  });
}

// --- what is measured ----------------------------------------------------------------------------

Cost Crowd::measure(const std::function<bool()>& done) {
  cost_ = {};
  for (const auto& peer : peers_) peer->sent = 0, peer->cpu = 0;
  broker_.sent = 0;
  broker_.cpu = 0;
  const Time start = simulation_.now();
  while (!done()) {
    require(simulation_.now() < start + kTimeout, "the group does not get on");
    simulation_.run_until(simulation_.now() + milliseconds(1), kMostEvents);
  }
  Cost cost = std::exchange(cost_, {});
  cost.took = simulation_.now() - start;
  cost.broker_sent = broker_.sent;
  cost.broker_cpu = cost.cpu = broker_.cpu;
  for (const auto& peer : peers_) {
    cost.most_sent = std::max(cost.most_sent, peer->sent);
    cost.most_cpu = std::max(cost.most_cpu, peer->cpu);
    cost.cpu += peer->cpu;
  }
  return cost;
}

bool Crowd::everybody(const std::function<bool(const Process&)>& holds) const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [&](const auto& peer) { return !peer->alive || holds(*peer); });
}

bool Crowd::in_one_epoch() const {
  const std::uint64_t epoch = peers_.front()->engine->members().epoch;
  const auto living = static_cast<std::size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->alive; }));
  return epoch != 0 && everybody([&](const Process& peer) {
           return peer.machine->connected() && peer.engine->members().epoch == epoch &&
                  peer.engine->members().size() == living;
         });
}

Cost Crowd::form() {
  return measure([this] { return in_one_epoch(); });
}

Cost Crowd::rounds(int count) {
  contributing_ = true;
  const std::uint64_t until =
      peers_.front()->machine->model_version() + static_cast<std::uint64_t>(count);
  for (const auto& peer : peers_) on(*peer, Duration(0), [this, &peer] { user_turn(*peer); });
  const Cost cost = measure([&] {
    return everybody([&](const Process& peer) { return peer.machine->model_version() >= until; });
  });
  contributing_ = false;
  idle(milliseconds(300));  // whatever was begun ends
  return cost;
}

Cost Crowd::idle(Duration duration) {
  const Time until = simulation_.now() + duration;
  return measure([&] { return simulation_.now() >= until; });
}

// Kills a member that is neither the first nor the leader.
Crowd::Process& Crowd::kill() {
  Process& victim = **std::find_if(peers_.rbegin(), peers_.rend(), [](const auto& peer) {
    return peer->alive && !peer->machine->is_leader() && peer->engine->rank() != 0;
  });
  victim.alive = false;
  return victim;
}

Cost Crowd::death() {
  on(broker_, milliseconds(1), [this, instance = kill().instance] {
    broker_.broker->peer_down(simulation_.now(), instance, group::Down::dead);
  });
  return measure([this] { return in_one_epoch(); });
}

Cost Crowd::deaths(int count) {
  std::vector<Uid> victims;
  while (static_cast<int>(victims.size()) < count) victims.push_back(kill().instance);
  for (const auto& peer : peers_) {
    on(*peer, milliseconds(1), [this, &member = *peer->member, victims] {
      for (const Uid& victim : victims) {
        member.peer_down(simulation_.now(), victim, group::Down::dead);
      }
    });
  }
  return measure([this] { return in_one_epoch(); });
}

Cost Crowd::join() {
  add_peer();
  return measure([this] { return in_one_epoch(); });
}

// --- the world -----------------------------------------------------------------------------------

void Crowd::on(Process& process, Duration delay, std::function<void()> action) {
  simulation_.after(delay, [this, &process, action = std::move(action)] {
    if (!process.alive) return;
    const double before = cpu_seconds();
    action();
    pump(process);
    process.cpu += cpu_seconds() - before;
  });
}

void Crowd::deliver(Process& from, const Uid& to, const char* service, std::size_t bytes,
                    std::function<void(Process&)> action) {
  ++from.sent;
  ++cost_.messages;
  ++cost_.by_service[service];
  cost_.bytes += bytes;
  const auto target = by_instance_.find(to);
  if (target == by_instance_.end()) return;
  // The same for all, so that messages of two processes keep their order.
  on(*target->second, microseconds(100),
     [process = target->second, action = std::move(action)] { action(*process); });
}

void Crowd::arm(Process& process) {
  Time due = kNever;
  if (process.broker) due = process.broker->next_deadline();
  if (process.member) {
    due = std::min(process.member->next_deadline(), process.machine->next_deadline());
  }
  if (due == kNever) return;
  const Time time = std::max(simulation_.now(), due) + microseconds(500);
  if (process.tick_at > simulation_.now() && process.tick_at <= time) return;
  process.tick_at = time;
  on(process, time - simulation_.now(), [this, &process, time] {
    if (process.tick_at != time) return;  // a later plan replaced this one
    process.tick_at = kNever;
    if (process.broker) return process.broker->tick(simulation_.now());
    process.member->tick(simulation_.now());
    process.machine->tick(simulation_.now());
  });
}

void Crowd::pump(Process& process) {
  if (process.broker) {
    for (auto& action : process.broker->drain()) {
      if (const auto* message = std::get_if<Broker::Send>(&action)) {
        send_group(process, message->instance, message->bytes);
      }
    }
  } else {
    while (pump_peer(process)) {
    }
  }
  arm(process);
}

bool Crowd::pump_peer(Process& process) {
  auto member_actions = process.member->drain();
  auto machine_actions = process.machine->take_actions();
  auto engine_actions = process.engine->take_actions();
  for (auto& action : member_actions) perform(process, action);
  for (auto& action : machine_actions) perform(process, action);
  for (auto& action : engine_actions) perform(process, action);
  const bool stepped = step(process);
  return stepped || !member_actions.empty() || !machine_actions.empty() || !engine_actions.empty();
}

bool Crowd::step(Process& process) {
  if (process.pipeline == nullptr) return false;
  collective::SharedPipeline& pipeline = *process.pipeline;
  pipeline.awake();
  bool worked = false;
  while (pipeline.step()) {
    worked = true;
    for (const std::uint32_t rank : pipeline.take_wakeups()) {
      on(*process.neighbours[rank], Duration(0), [] {});
    }
  }
  for (auto& sum : pipeline.take_sums()) process.engine->summed_here(std::move(sum));
  for (const auto& ended : pipeline.take_ended()) {
    if (!ended.abandoned) process.engine->passed(ended.s);
  }
  if (worked) return true;
  pipeline.announce_sleep();
  return !pipeline.may_sleep();
}

// The members of each host share a segment from the moment at which all are in the epoch.
void Crowd::enter(Process& process, const accumulate::EnterEpoch& enter) {
  process.pipeline.reset();
  const collective::EpochMembers& members = *enter.members;
  if (members.epoch > epoch_) {
    epoch_ = members.epoch;
    segments_.clear();
    entered_ = 0;
  }
  const bool is_newest = members.epoch == epoch_ && members.size() > 0;
  if (is_newest) share_memory(process, members);
  entered_ += is_newest ? 1 : 0;
  if (is_newest && entered_ == members.size()) {
    for (const auto& member : members.members) {
      by_instance_.at(member.instance)->machine->shared_ready(members.epoch);
    }
  }
  Error changed;
  changed.code = ErrorCode::group_changed;
  process.engine->set_members(enter.members, changed);
}

void Crowd::share_memory(Process& process, const collective::EpochMembers& members) {
  const collective::Hosts& hosts = members.hosts;
  const std::uint32_t self = members.rank_of(process.instance).value();
  if (!hosts.share_memory() || hosts.is_guest(self)) return;
  const std::vector<std::uint32_t>& ranks = hosts.ranks[hosts.of[self]];
  const collective::PipelineLayout layout{members.epoch, static_cast<std::uint32_t>(ranks.size()),
                                          2, collective::kWindowBytes};
  const std::size_t bytes = collective::PipelineSegment::bytes_of(layout);
  std::shared_ptr<void>& segment = segments_[members[self].host_key];
  const bool is_first = segment == nullptr;
  if (is_first)
    segment = {std::calloc(bytes, 1), std::free};  // windows that none uses cost nothing
  const std::span<std::byte> span{static_cast<std::byte*>(segment.get()), bytes};
  if (is_first) collective::PipelineSegment::initialise(span, layout);
  process.pipeline = std::make_unique<collective::SharedPipeline>(
      collective::PipelineSegment(segment, span, layout), hosts.place(self), heap_);
  process.neighbours.clear();
  for (const std::uint32_t rank : ranks) {
    process.neighbours.push_back(by_instance_.at(members[rank].instance));
  }
}

// A user who does everything at once.
void Crowd::user_turn(Process& process) {
  Machine& machine = *process.machine;
  const Time now = simulation_.now();
  process.user_turn_due = false;
  if (!machine.connected()) machine.user_active(now);
  if (machine.wants_state()) {
    wire::Payload state;
    state.body = bucket_;
    machine.set_state(now, std::move(state));
  }
  if (const auto state = machine.new_state()) machine.state_installed(now, state->number);
  while (const auto round = machine.next_result()) {
    if (round->may_take) machine.take_result(round->number());
    machine.delivered(now, round->number());
  }
  if (contributing_ && machine.wants_gradients(now)) {
    machine.offer(now, bucket_, 1, {{"steps", 1}});
  }
}

void Crowd::send_group(Process& from, const Uid& to, const Buffer& bytes) {
  deliver(from, to, "group", bytes.size(), [this, sender = from.instance, bytes](Process& target) {
    if (target.broker) return target.broker->received(simulation_.now(), sender, bytes.span());
    target.member->received(simulation_.now(), sender, bytes.span());
  });
}

void Crowd::perform(Process& process, Member::Action& action) {
  if (auto* announce = std::get_if<Member::SendToBroker>(&action)) {
    send_group(process, broker_.instance, announce->bytes);
  } else if (auto* relay = std::get_if<Member::SendToMember>(&action)) {
    send_group(process, relay->instance, relay->bytes);
  } else if (auto* made = std::get_if<Member::NewView>(&action)) {
    // The size of the round grows and shrinks with the group.
    process.machine->set_virtual_batch_size(static_cast<std::int64_t>(made->view->members.size()));
    process.machine->view(simulation_.now(), made->view);
  } else if (std::holds_alternative<Member::Evicted>(action)) {
    require(false, process.name + " was evicted");
  }
}

void Crowd::perform(Process& process, Engine::Action& action) {
  if (auto* message = std::get_if<Engine::Send>(&action)) {
    deliver(process, message->instance, "collective", message->payload.bytes(),
            [sender = process.instance, payload = std::move(message->payload)](Process& target) {
              target.engine->received(sender, payload);
            });
  } else if (auto* sum = std::get_if<Engine::Sum>(&action)) {
    collective::run(sum->work);
    process.engine->summed(sum->op, sum->run, sum->id);
  } else if (auto* pass = std::get_if<Engine::Pass>(&action)) {
    process.pipeline->start(std::move(pass->operation));
  } else if (auto* publish = std::get_if<Engine::Publish>(&action)) {
    process.pipeline->publish(publish->s, publish->chunk, std::move(publish->result));
  } else if (auto* abandon = std::get_if<Engine::Abandon>(&action)) {
    if (process.pipeline != nullptr) process.pipeline->abandon(abandon->s);
  } else if (auto* done = std::get_if<Engine::Done>(&action)) {
    const auto [epoch, round] = process.reductions.at(done->op);
    process.reductions.erase(done->op);
    if (!done->error) process.machine->reduced(simulation_.now(), epoch, round, done->tensor);
  }
}

void Crowd::perform(Process& process, accumulate::Action& action) {
  const Time now = simulation_.now();
  if (auto* message = std::get_if<accumulate::Send>(&action)) {
    const bool snapshot = message->service == accumulate::kSnapshotService;
    deliver(process, message->instance, snapshot ? "snapshot" : "accumulate",
            message->payload.bytes(),
            [this, sender = process.instance, service = message->service,
             payload = std::move(message->payload)](Process& target) {
              target.machine->received(simulation_.now(), sender, service, payload);
            });
  } else if (auto* enter = std::get_if<accumulate::EnterEpoch>(&action)) {
    this->enter(process, *enter);
  } else if (auto* reduction = std::get_if<accumulate::Reduce>(&action)) {
    reduce(process, *reduction);
  } else if (auto* activate = std::get_if<accumulate::Activate>(&action)) {
    process.member->activate(now, activate->epoch);
  } else if (auto* has = std::get_if<accumulate::HasState>(&action)) {
    process.member->set_has_state(now, has->has_state);
  } else if (std::holds_alternative<accumulate::Wake>(action)) {
    if (std::exchange(process.user_turn_due, true)) return;
    on(process, Duration(0), [this, &process] { user_turn(process); });
  } else if (std::holds_alternative<accumulate::Demote>(action)) {
    require(false, process.name + " asks for the demotion of a member");
  } else if (const auto* failed = std::get_if<accumulate::Failed>(&action)) {
    require(false, failed->error.message);
  }
}

void Crowd::reduce(Process& process, accumulate::Reduce& reduction) {
  collective::OpSpec spec;
  spec.dtype = tensor::DType::int64;
  spec.shape = {static_cast<std::int64_t>(elements_)};
  spec.contributors = std::move(reduction.contributors);
  Engine::Options options;
  options.number = reduction.round;
  options.shared = reduction.shared;
  const auto op = process.engine->start("round", std::move(spec), std::move(reduction.inputs),
                                        std::move(options));
  process.reductions[op] = {reduction.epoch, reduction.round};
}

}  // namespace moolink::sim
