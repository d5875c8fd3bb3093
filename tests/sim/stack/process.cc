// The node of a simulated process, and the network below it.

#include "stack/process.h"

#include <algorithm>
#include <array>
#include <variant>

#include "common/program.h"
#include "stack/world.h"

namespace moolink::sim {
namespace {

constexpr std::uint16_t kLanes = 3;

rpc::Config node_config(const Process& process) {
  rpc::Config config;
  config.instance = process.instance;
  config.name = process.name;
  config.host_key = process.host_key();
  return config;
}

}  // namespace

Process::Process(World& world, int number_is, Uid instance_is)
    : number(number_is),
      name(number_is == 0 ? "broker" : "p" + std::to_string(number_is)),
      instance(instance_is),
      world_(&world),
      node_(node_config(*this), allocator_, authenticator_) {}

Uid Process::host_key() const {
  return {7, static_cast<std::uint64_t>(number % world_->scenario.hosts) + 1};
}

std::vector<std::string> Process::addresses() const {
  return {"tcp://10.0.0." + std::to_string(number) + ":1", "shm://host/" + std::to_string(number)};
}

Time Process::now() const { return world_->simulation.now(); }

void Process::note(const std::string& what) const { world_->simulation.note(name + " " + what); }

void Process::start() {
  note("starts");
  node_.listening(addresses());
  if (is_broker()) {
    group::BrokerConfig config;
    config.abandon_after = seconds(4);
    broker_ = std::make_unique<Broker>(config, world_->simulation.random.next(), now());
  } else {
    node_.define("work");
    node_.connect(now(), "tcp://10.0.0.0:1");
    make_group();
    if (world_->scenario.calls) later(milliseconds(200), [this] { make_call(); });
  }
  act();
}

// --- when it runs --------------------------------------------------------------------------------

bool Process::awake() const { return alive_ && paused_until <= now(); }

void Process::later(Duration delay, std::function<void()> action) {
  world_->simulation.after(
      delay, [this, action = std::move(action)]() mutable { run(std::move(action)); });
}

// A stopped process does nothing until it is continued, and then all at once, in order.
void Process::run(std::function<void()> action) {
  if (!alive_) return;
  if (!awake()) {
    world_->simulation.at(paused_until,
                          [this, action = std::move(action)]() mutable { run(std::move(action)); });
    return;
  }
  action();
  act();
}

void Process::die(bool quietly) {
  if (!alive_) return;
  note(quietly ? "vanishes" : "dies");
  alive_ = false;
  vanished_ = quietly;
  world_->network.crash(*this, quietly);
}

void Process::stop(Duration duration) { paused_until = std::max(paused_until, now() + duration); }

// Each machine's actions may give another one something to do.
void Process::act() {
  for (bool busy = true; busy && alive_;) {
    busy = act_on_node();
    busy |= is_broker() ? act_on_broker() : act_on_peer();
  }
  if (alive_) arm();
}

bool Process::act_on_node() {
  node_actions_.clear();
  node_.drain(node_actions_);
  for (rpc::Action& action : node_actions_) {
    if (alive_) std::visit([this](auto& which) { perform(which); }, action);
  }
  return !node_actions_.empty();
}

Time Process::next_deadline() const {
  Time next = node_.next_deadline();
  if (broker_) next = std::min(next, broker_->next_deadline());
  if (member_) next = std::min(next, member_->next_deadline());
  if (made_) next = std::min(next, machine_->next_deadline());
  return next;
}

void Process::arm() {
  Time next = next_deadline();
  if (next == kNever) return;
  next = std::max(next, now()) +
         world_->simulation.between(microseconds(50), microseconds(500));  // as late as a timer is
  if (next >= timer_) return;
  timer_ = next;
  const std::uint64_t token = ++timer_token_;
  world_->simulation.at(next, [this, token] {
    run([this, token] {
      if (token == timer_token_) tick();
    });
  });
}

void Process::tick() {
  timer_ = kNever;
  node_.tick(now());
  if (broker_) broker_->tick(now());
  if (member_) member_->tick(now());
  if (made_) machine_->tick(now());
}

// --- what the network tells ----------------------------------------------------------------------

void Process::received(ConnectionId connection, const wire::ReceivedFrame& frame) {
  if (!alive_) return;
  node_.received(now(), connection, frame);
  act();
}

std::span<std::byte> Process::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  return alive_ ? node_.chunk_target(connection, head) : std::span<std::byte>{};
}

void Process::chunk_received(ConnectionId connection, const wire::ChunkHead& head) {
  if (!alive_) return;
  node_.event(&session::Session::chunk_received, now(), connection, head);
  act();
}

void Process::closed(ConnectionId connection, const Error& error) {
  if (!alive_) return;
  node_.closed(now(), connection, error);
  act();
}

void Process::writable(ConnectionId connection) {
  if (!alive_) return;
  node_.event(&session::Session::writable, now(), connection);
  act();
}

void Process::grant_filled(ConnectionId connection, std::uint64_t grant) {
  if (!alive_) return;
  node_.event(&session::Session::grant_filled, now(), connection, grant);
  act();
}

// --- what the node wants done --------------------------------------------------------------------

void Process::perform(rpc::Write& action) {
  world_->before_frame(*this);
  if (alive_) world_->network.write(action.connection, std::move(action.frame));
}

void Process::perform(rpc::CloseConnection& action) { world_->network.close(action.connection); }

void Process::perform(rpc::AllocateGrant& action) {
  if (action.seq == 0) ++coverage["standing grants"];
  auto [place, memory] = world_->network.allocate_grant(action.connection, action.bytes);
  node_.event(&session::Session::grant_ready, now(), action.connection, action.seq, action.part,
              place, std::move(memory));
}

void Process::perform(rpc::FillGrant& action) {
  world_->network.fill_grant(action.connection, action.place, action.bytes);
}

void Process::perform(rpc::Dial& action) {
  later(world_->simulation.between(microseconds(10), milliseconds(2)),
        [this, address = action.address] { dial(address); });
}

void Process::dial(const std::string& address) {
  const auto fail = [&](ErrorCode code, const char* why) {
    node_.dial_failed(now(), address, make_error(code, why));
  };
  Process* other = world_->listener(address);
  const bool shm = address.starts_with("shm");
  if (other == nullptr || (!other->alive() && other->answers_dials())) {
    return fail(ErrorCode::peer_lost, "nobody listens there");
  }
  if (!other->alive() || world_->cut_off(number, other->number)) {
    return fail(ErrorCode::timeout, "no answer");
  }
  if (shm && other->host_key() != host_key()) return fail(ErrorCode::error, "another host");
  const Path& path = world_->path(shm);
  const auto [ours, theirs] = world_->network.connect(*this, *other, path);
  other->later(Duration(0), [other, end = theirs, &path] {
    other->node_.opened(other->now(), end, path.kind, path.traits, "");
  });
  node_.opened(now(), ours, path.kind, path.traits, address);
}

void Process::perform(rpc::PeerUp& action) {
  note("sees " + action.name);
  if (is_broker()) return;
  if (action.name == "broker") {
    broker_instance_ = action.instance;
    member_->broker_up(now(), action.instance);
  }
  member_->peer_up(now(), action.instance);
}

void Process::perform(rpc::PeerDown& action) {
  static constexpr std::array kHow = {group::Down::dead, group::Down::unreachable,
                                      group::Down::closed};  // in the order of rpc::Down
  const group::Down how = kHow.at(static_cast<std::size_t>(action.how));
  note("has lost " + action.name);
  ++coverage["peers down"];
  const Process* lost = world_->find(action.instance);
  require(action.how != rpc::Down::dead || lost == nullptr || !lost->alive(),
          name + " called " + action.name + " dead, who lives");
  require(!world_->mild() || lost == nullptr || !lost->alive(),
          name + " lost " + action.name + " by faults that are too short");
  if (is_broker()) return broker_->peer_down(now(), action.instance, how);
  if (action.instance == broker_instance_) {
    broker_instance_ = {};
    member_->broker_down(now());
  }
  lost_session(action.instance, how);
}

void Process::perform(rpc::Undelivered& action) {
  ++coverage["messages undelivered"];
  if (member_) lost_session(action.instance, group::Down::unreachable);
}

void Process::lost_session(const Uid& peer, group::Down how) {
  if (machine_) machine_->session_lost(peer);
  member_->peer_down(now(), peer, how);
}

void Process::perform(rpc::Refused& action) { require(false, action.error.message); }

void Process::perform(rpc::Log& action) {
  note(action.text);
  require(action.text.find("broke the protocol") == std::string::npos, action.text);
}

void Process::perform(rpc::ServiceMessage& action) {
  world_->simulation.trace.add(static_cast<std::uint64_t>(number) << 8 |
                               static_cast<std::uint64_t>(action.service));
  ++coverage["service messages"];
  service_message(action);
}

void Process::send(const Uid& to, const std::string& to_name, rpc::Service service,
                   wire::Payload payload) {
  node_.send_service_to(now(), to, to_name, service, std::move(payload));
}

// --- calls between everything else ---------------------------------------------------------------

void Process::make_call() {
  Simulation& simulation = world_->simulation;
  if (world_->contributing()) {
    const int peers = world_->scenario.processes() - 1;
    const int to = 1 + static_cast<int>(simulation.random.below(static_cast<std::uint64_t>(peers)));
    const auto lane = static_cast<std::uint16_t>(simulation.random.below(kLanes));
    const std::size_t bytes = simulation.random.below(simulation.random.chance(1, 4) ? 40000 : 300);
    const Duration timeout = simulation.between(milliseconds(20), seconds(6));
    const std::string peer = "p" + std::to_string(to);
    const std::uint64_t call = world_->calls.make(instance, peer, lane, now() + timeout, bytes);
    const wire::Payload& arguments = world_->calls.of(call).arguments;
    calls_[node_.call(now(), peer, "work", arguments, timeout, lane)] = call;
  }
  later(simulation.between(milliseconds(100), milliseconds(900)), [this] { make_call(); });
}

void Process::perform(rpc::RunHandler& action) {
  const std::uint64_t call = world_->calls.runs(now(), name, action);
  if (const std::uint16_t lane = world_->calls.of(call).lane; lane != 0) {
    std::uint64_t& last = lane_order_[{action.key.caller, lane}];
    require(last < call, "call " + std::to_string(call) + " was run before its turn in the lane");
    last = call;
  }
  running_.insert(action.key);
  later(world_->simulation.between(Duration(0), milliseconds(20)), [this, call, key = action.key] {
    if (running_.erase(key) == 0) return;
    Call& record = world_->calls.of(call);
    record.replied = true;
    node_.reply(now(), key, record.arguments);
  });
}

void Process::perform(rpc::CancelHandler& action) { running_.erase(action.key); }

void Process::perform(rpc::Complete& action) {
  const auto found = calls_.find(action.id);
  require(found != calls_.end(), "a result for a call that nobody made, or a second one");
  world_->calls.completes(now(), found->second, action.result, paused_until);
  calls_.erase(found);
}

}  // namespace moolink::sim
