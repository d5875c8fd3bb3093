#include "rpc/world.h"

#include <algorithm>
#include <cstring>

#include "common/program.h"

namespace moolink::sim {

Settings Settings::from(Random& random) {
  Settings settings;
  settings.limits.send_window_bytes = (std::size_t{64} + random.below(512)) << 10;
  settings.limits.send_window_messages = 8 + random.below(60);
  settings.peers = 2 + static_cast<int>(random.below(3));
  for (int i = 0; i < settings.peers; ++i) {
    settings.hosts.push_back(static_cast<int>(random.below(2)));
  }
  settings.tcp.kind = wire::PathKind::tcp;
  settings.tcp.traits.chunk_bytes = std::size_t{1} << (11 + random.below(6));
  settings.tcp.latency = microseconds(50 + static_cast<int>(random.below(5000)));
  settings.tcp.bytes_per_us = static_cast<double>(20 + random.below(500));
  settings.shm.kind = wire::PathKind::shm;
  settings.shm.traits = {true, std::size_t{1} << 16, 1};
  settings.shm.traits.standing_grants = true;
  settings.shm.traits.loans = random.chance(3, 4);
  settings.shm.latency = microseconds(5);
  settings.shm.bytes_per_us = 1000;
  settings.calls = 20 + static_cast<int>(random.below(160));
  settings.active = milliseconds(500 + static_cast<int>(random.below(4000)));
  settings.mild = random.chance(1, 2);
  settings.crashes = !settings.mild;
  settings.pauses = !settings.mild && random.chance(1, 2);
  settings.imposter = random.chance(1, 4);
  // A peer that is silent may lose its name to an imposter.
  settings.blackhole = !settings.imposter && random.chance(1, 2);
  settings.outsider = random.chance(1, 2);
  // Names of peers that may never meet are told apart by what is overheard: not with imposters.
  if (!settings.imposter && settings.peers > 2 && random.chance(1, 2)) {
    settings.scopes = {""};
    for (int i = 1; i < settings.peers; ++i) {
      settings.scopes.push_back(std::vector<std::string>{"", "a", "b", "b"}[random.below(4)]);
    }
    settings.namesake_of =
        static_cast<int>(1 + random.below(static_cast<std::uint64_t>(settings.peers) - 1));
  }
  return settings;
}

World::World(std::uint64_t seed, bool trace)
    : simulation(seed, trace), settings(Settings::from(simulation.random)) {
  processes_.resize(static_cast<std::size_t>(settings.peers));
  start(0);
  for (int number = 1; number < settings.peers; ++number) {
    const bool late = simulation.random.chance(1, 3);
    const Duration delay = late ? simulation.between(Duration(0), milliseconds(900)) : Duration(0);
    start(number);
    process(number).paused_until = simulation.now() + delay;  // it listens, and does nothing yet
  }
}

std::uint64_t World::run() {
  end_of_faults_ = simulation.now() + settings.active;
  plan_calls();
  plan_faults();
  simulation.at(end_of_faults_, [this] { network.chunks_get_stuck = false; });
  simulation.at(end_of_faults_ + seconds(10), [this] { probe_names(); });
  simulation.at(end_of_faults_ + seconds(15), [this] { probe(); });
  simulation.run_until(end_of_faults_ + seconds(40));
  check_calls();
  for (int number = 0; number < settings.peers; ++number) process(number).close();
  simulation.run_until(end_of_faults_ + seconds(50));
  check_at_end();
  const std::uint64_t hash = simulation.trace.hash();
  check_successor();
  return hash;
}

void World::start(int number) {
  const std::string name = number == 0 ? "hub" : "peer" + std::to_string(number);
  auto& incarnations = processes_[static_cast<std::size_t>(number)];
  incarnations.push_back(
      std::make_unique<Process>(*this, number, name, Uid::random(simulation.random)));
  Process& started = *incarnations.back();
  simulation.at(simulation.now(), [&started] { started.start(); });
}

Process* World::listener(const std::string& address) {
  for (const auto& incarnations : processes_) {
    const std::vector<std::string> own = incarnations.back()->addresses();
    if (std::find(own.begin(), own.end(), address) != own.end()) return incarnations.back().get();
  }
  if (namesake != nullptr && std::ranges::count(namesake->addresses(), address) > 0) {
    return namesake;
  }
  return nullptr;
}

bool World::partitioned(int a, int b) const {
  const auto cut_off = [this](int number) {
    const auto found = partitioned_until_.find(number);
    return found != partitioned_until_.end() && found->second > simulation.now();
  };
  return cut_off(a) || cut_off(b);
}

bool World::runs(const Uid& instance) const {
  for (const auto& incarnations : processes_) {
    for (const auto& process : incarnations) {
      if (process->instance == instance) return process->alive() && !process->is_closed();
    }
  }
  return false;
}

bool World::may_meet(int a, int b) const {
  const auto scope = [this](int number) {
    const auto index = static_cast<std::size_t>(number);
    return index < settings.scopes.size() ? settings.scopes[index] : std::string();
  };
  return scope(a).empty() || scope(b).empty() || scope(a) == scope(b);
}

void World::connected(ConnectionId dialler, ConnectionId acceptor, int from, int to) {
  greetings_[dialler] = greetings_[acceptor] = overheard.size();
  overheard.push_back({from, to, {}, {}, {}});
}

int World::other_end(ConnectionId connection, int number) const {
  const auto found = greetings_.find(connection);
  if (found == greetings_.end()) return -1;
  const Overheard& greeting = overheard[found->second];
  return greeting.dialler == number ? greeting.acceptor : greeting.dialler;
}

void World::overhear(ConnectionId connection, const wire::Frame& frame) {
  const auto found = greetings_.find(connection);
  const wire::FrameType type = frame.header.type;
  if (found == greetings_.end() ||
      (type != wire::FrameType::hello && type != wire::FrameType::welcome)) {
    return;
  }
  Overheard& greeting = overheard[found->second];
  auto said = wire::decode<wire::Hello>(frame.control.span());
  if (type == wire::FrameType::welcome) {
    if (!greeting.welcome) greeting.welcome = std::move(said);
  } else if (!greeting.hello) {
    greeting.hello = std::move(said);
  } else {
    greeting.answer = std::move(said);
  }
}

// Rarely: who is answered by an outsider each time does not reach its peer, or loses its name to an
// imposter.
bool World::outsider_takes_dial() {
  if (!settings.outsider || settings.imposter || dials_taken > 1) return false;
  if (simulation.now() > end_of_faults_) return false;
  if (!simulation.random.chance(1, 16)) return false;
  ++dials_taken;
  return true;
}

CallRecord& World::new_call(int from, int to) {
  Random& random = simulation.random;
  const std::uint64_t number = calls.size() + 1;
  CallRecord& record = calls[number];
  record.number = number;
  record.caller = process(from).name;
  record.peer = process(to).name;
  record.function = random.chance(1, 20) ? "missing" : "work";
  record.lane = static_cast<std::uint16_t>(random.below(4));
  std::size_t body = 8 + random.below(100);
  if (random.chance(1, 40)) body += random.below(60'000);
  const MutableBuffer bytes = HeapAllocator().allocate(body);
  std::memcpy(bytes.data(), make_bytes(number, body).data(), body);
  std::memcpy(bytes.data(), &number, sizeof number);
  record.arguments.body = bytes;
  const std::size_t parts = random.chance(1, 4) ? 1 + random.below(2) : 0;
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t size = random.chance(1, 2) ? random.below(500) : random.below(150'000);
    record.arguments.parts.push_back(make_bytes(number * 16 + part, size));
  }
  record.lends = random.chance(1, 2);
  record.handler_fails = random.chance(1, 10);
  if (random.chance(1, 5)) {
    record.credit = 1 + random.below(6);
    record.items = random.below(30);
  }
  if (!random.chance(1, 20)) {
    record.handler_takes =
        simulation.between(Duration(0), random.chance(1, 4) ? milliseconds(800) : milliseconds(5));
  }
  return record;
}

void World::plan_calls() {
  for (int i = 0; i < settings.calls; ++i) {
    const Time at = simulation.now() + simulation.between(Duration(0), settings.active);
    simulation.at(at, [this] {
      Random& random = simulation.random;
      const int from = static_cast<int>(random.below(static_cast<std::uint64_t>(settings.peers)));
      const int to = static_cast<int>(random.below(static_cast<std::uint64_t>(settings.peers)));
      if (!process(from).awake()) return;
      if (random.chance(1, 8)) process(from).send_service(process(to).name);
      CallRecord& record = new_call(from, to);
      const bool of_token = has_namesake(to) && process(to).scope().empty();
      if (of_token && process(from).scope().empty() && random.chance(1, 2)) {
        record.group = settings.scopes.back();
      }
      // Without a time limit only what must end by itself, or by being cancelled.
      const bool cancelled = random.chance(1, 6);
      const bool limited =
          !may_meet(from, to) || (!record.handler_takes && !cancelled) || random.chance(1, 2);
      Process& caller = process(from);
      caller.call(record, limited ? simulation.between(milliseconds(1), seconds(6)) : Duration(-1));
      if (cancelled) {
        const Duration latest = random.chance(1, 3) ? milliseconds(3) : milliseconds(100);
        simulation.after(simulation.between(Duration(0), latest),
                         [&caller, &record] { caller.cancel(record); });
      }
    });
  }
}

Duration World::fault_duration() {
  return simulation.between(milliseconds(1), settings.mild ? milliseconds(400) : seconds(5));
}

void World::plan_faults() {
  // What is cut off for ever must be found out and dialled anew within the time that a session
  // lasts: no place for many other faults.
  const std::uint64_t most = settings.mild ? (settings.blackhole ? 2 : 4) : 10;
  if (settings.blackhole) {
    simulation.after(simulation.between(Duration(0), settings.active), [this] { blackhole(); });
  }
  for (std::uint64_t i = settings.outsider ? simulation.random.below(12) : 0; i > 0; --i) {
    simulation.after(simulation.between(Duration(0), settings.active), [this] {
      Process& target = process(
          static_cast<int>(simulation.random.below(static_cast<std::uint64_t>(settings.peers))));
      if (target.awake() && !target.is_closed()) outsider.attack(target);
    });
  }
  const std::uint64_t faults = simulation.random.below(most);
  for (std::uint64_t i = 0; i < faults; ++i) {
    simulation.after(simulation.between(Duration(0), settings.active), [this] { fault(); });
  }
  if (settings.imposter && settings.peers > 1) plan_imposter();
  if (settings.namesake_of != 0) plan_namesake();
}

void World::plan_imposter() {
  settings.hosts.push_back(0);
  imposter_ = std::make_unique<Process>(*this, settings.peers, process(kVictim).name,
                                        Uid::random(simulation.random));
  imposter = imposter_.get();
  // It may meet those who have just lost the connection to the one that bears its name.
  const bool after_a_cut = simulation.random.chance(1, 2);
  simulation.after(simulation.between(seconds(1), seconds(2)), [this, after_a_cut] {
    Process& victim = process(kVictim);
    if (after_a_cut && victim.alive()) network.cut_all_of(victim);
    imposter->start();
  });
}

// A peer with a group's key and the name of a peer that lives. If that one has a group's key, too,
// it is that of another group. The new peer may come after calls to the other.
void World::plan_namesake() {
  const std::string name = process(settings.namesake_of).name;
  const bool in_a = settings.scopes[static_cast<std::size_t>(settings.namesake_of)] == "a";
  settings.hosts.push_back(static_cast<int>(simulation.random.below(2)));
  settings.scopes.emplace_back(in_a ? "b" : "a");
  namesake_ =
      std::make_unique<Process>(*this, settings.peers, name, Uid::random(simulation.random));
  namesake = namesake_.get();
  simulation.after(simulation.between(Duration(0), settings.active), [this] { namesake->start(); });
}

bool World::knows_better(const CallRecord& record, const Process& place) const {
  if (namesake == nullptr || record.peer != namesake->name) return false;
  if (!settings.mild || settings.blackhole || place.scope() == record.group) return false;
  const auto of = [this](int number) {
    return processes_[static_cast<std::size_t>(number)].back().get();
  };
  const Process& hub = *of(0);
  const Process& caller = *of(record.from_number);
  if (!caller.scope().empty() || caller.instance != record.from) return false;
  const Process* victim = of(settings.namesake_of);
  Time since{};
  for (const Process* bearer : {static_cast<const Process*>(namesake), victim}) {
    const bool none_is_meant = record.group.empty() && !victim->scope().empty();
    if (none_is_meant || bearer->scope() == record.group) {
      since = std::max(since, hub.sees_since(bearer->instance));
    }
  }
  if (record.from_number != 0) {
    since = std::max(since, caller.sees_since(hub.instance));
    if (since != kNever) since += seconds(2);
  }
  return record.began > since;
}

bool World::has_met_namesake(const Process& one) const {
  const auto is = [&one](const Process& other) {
    return &other != &one && other.name == one.name && other.died_at() > one.started_at();
  };
  return (imposter != nullptr && is(*imposter)) || (namesake != nullptr && is(*namesake)) ||
         std::ranges::any_of(processes_, [&](const auto& in_one_place) {
           return std::ranges::any_of(in_one_place, [&](const auto& other) { return is(*other); });
         });
}

void World::fault() {
  Random& random = simulation.random;
  const std::vector<ConnectionId> working = network.working();
  const std::uint64_t kind = random.below(10);
  const int number = static_cast<int>(random.below(static_cast<std::uint64_t>(settings.peers)));
  if (kind < 5 && !working.empty()) {
    const ConnectionId victim = working[random.below(working.size())];
    simulation.note("cut " + std::to_string(victim));
    network.cut(victim);
  } else if (kind < 7 && !working.empty()) {
    const ConnectionId victim = working[random.below(working.size())];
    simulation.note("stall " + std::to_string(victim));
    network.stall(victim, fault_duration());
  } else if (kind == 7) {
    const Duration duration = fault_duration();
    simulation.note("partition of " + std::to_string(number));
    partitioned_until_[number] = simulation.now() + duration;
    network.stall_all_of(process(number), duration);
  } else if (kind == 8 && settings.crashes) {
    if (!process(number).alive()) return;
    simulation.note("crash of " + std::to_string(number));
    process(number).die(random.chance(1, 4));
    simulation.after(simulation.between(Duration(0), milliseconds(500)),
                     [this, number] { start(number); });
  } else if (kind == 9 && settings.pauses) {
    simulation.note("pause of " + std::to_string(number));
    Process& stopped = process(number);
    stopped.paused_until = std::max(stopped.paused_until, simulation.now() + fault_duration());
  }
}

// A firewall forgets a connection: nothing gets through any more, and nobody is told.
void World::blackhole() {
  const std::vector<ConnectionId> working = network.working();
  if (working.empty()) return;
  const ConnectionId victim = working[simulation.random.below(working.size())];
  simulation.note("blackhole " + std::to_string(victim));
  network.stall(victim, seconds(3600));
  ++coverage["connections dropped silently"];
}

// The network works again. A name that two groups have is ambiguous; with a group it is certain.
// The name of a holder of the token is certain alone.
void World::probe_names() {
  if (namesake == nullptr) return;
  const auto number = static_cast<std::size_t>(settings.namesake_of);
  for (int from = 0; from < settings.peers; ++from) {
    if (!process(from).scope().empty()) continue;
    for (const bool with_group : {false, true}) {
      // Two peers of one name do not meet.
      if (with_group && from == settings.namesake_of) continue;
      CallRecord& record = new_call(from, settings.namesake_of);
      record.function = "work";
      record.handler_fails = false;
      record.credit = 0;
      record.handler_takes = milliseconds(1);
      const std::string& scope = settings.scopes[number];
      if (with_group) record.group = scope.empty() ? settings.scopes.back() : scope;
      const bool certain = with_group || scope.empty();
      (certain ? probes_ : ambiguous_).push_back(record.number);
      process(from).call(record, seconds(3));
    }
  }
}

// All is well again: everybody reaches everybody.
void World::probe() {
  if (imposter != nullptr) imposter->die(false);
  if (namesake != nullptr) namesake->die(false);
  for (const auto& [number, record] : calls) {
    require(!settings.mild || record.done || record.from.empty(),
            "call " + std::to_string(number) + " does not come to an end");
  }
  simulation.after(seconds(6), [this] {
    for (int from = 0; from < settings.peers; ++from) {
      for (int to = 0; to < settings.peers; ++to) {
        if (!may_meet(from, to)) continue;
        CallRecord& record = new_call(from, to);
        record.function = "work";
        record.handler_fails = false;
        record.credit = 0;
        record.handler_takes = milliseconds(1);
        probes_.push_back(record.number);
        process(from).call(record, seconds(10));
      }
    }
  });
}

void World::check_calls() const {
  std::set<Uid> dead;
  for (const auto& incarnations : processes_) {
    for (const auto& process : incarnations) {
      if (!process->alive()) dead.insert(process->instance);
    }
  }
  for (const auto& incarnations : processes_) {
    if (incarnations.back()->alive()) incarnations.back()->check_loans();
  }
  for (const std::uint64_t number : probes_) {
    const CallRecord& record = calls.at(number);
    require(record.done && !record.error,
            "a call did not succeed though the network is well again: " + record.caller + " to " +
                record.peer + ": " + (record.error ? record.error->message : "no result"));
  }
  for (const std::uint64_t number : ambiguous_) {
    const CallRecord& record = calls.at(number);
    require(record.done && record.error && is_ambiguous(*record.error),
            "a call of " + record.caller + " took the first peer called " + record.peer);
  }
  for (const auto& [number, record] : calls) {
    const std::string which = "call " + std::to_string(number);
    if (record.from.empty() || dead.contains(record.from)) continue;
    require(record.done, which + " never completed");
    const bool lost = record.error && record.error->code == ErrorCode::peer_lost;
    require(!settings.mild || !lost, which + " lost its peer by faults that are too short");
    if (record.error && record.error->ran == Ran::no && record.error->code != ErrorCode::remote) {
      require(record.runs == 0, which + " was run, but its error says not");
    }
    // A cancelled call has been told to its handler, unless that had replied before.
    if (settings.mild && record.cancelled && record.runs > 0 && imposter == nullptr) {
      require(record.replied || record.cancel_seen, which + " was cancelled, its handler not told");
    }
    coverage["calls failed by loss"] += lost ? 1 : 0;
    coverage["calls cancelled"] += record.cancelled ? 1 : 0;
    coverage["calls timed out"] += record.error && record.error->code == ErrorCode::timeout ? 1 : 0;
    coverage["calls succeeded"] += record.error ? 0 : 1;
  }
}

void World::check_at_end() {
  for (const auto& incarnations : processes_) {
    require(incarnations.back()->is_closed(), "close() did not come to an end");
    for (const auto& process : incarnations) process->check_at_end();
  }
  require(!settings.mild || imposter != nullptr || lending.all_back([](auto) { return true; }),
          "memory was lent and did not come back");
}

// A message for an instance that has ended does not reach the one that bears its name now.
void World::check_successor() {
  const Uid ended = process(0).instance;
  start(0);
  start(1);
  simulation.run_until(simulation.now() + seconds(3));
  process(1).send_service_to_ended(ended, process(0).name);
  simulation.run_until(simulation.now() + seconds(5));
  require(process(1).undelivered() == 1, "nobody was told of a message to an instance that ended");
}

}  // namespace moolink::sim
