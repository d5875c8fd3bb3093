#include "session/world.h"

#include <algorithm>

#include "common/program.h"

namespace moolink::sim {

Settings Settings::from(Random& random) {
  Settings settings;
  settings.limits.send_window_bytes = (std::size_t{64} + random.below(512)) << 10;
  settings.limits.send_window_messages = 8 + random.below(100);
  const wire::PathKind kinds[] = {wire::PathKind::tcp, wire::PathKind::shm, wire::PathKind::verbs};
  const std::size_t count = 1 + random.below(3);
  for (std::size_t i = 0; i < count; ++i) {
    Path path;
    path.kind = kinds[i];
    path.traits.grants = i > 0 && random.chance(3, 4);
    path.traits.chunk_bytes = std::size_t{1} << (10 + random.below(7));
    path.traits.preference = static_cast<int>(i);
    path.traits.standing_grants = path.kind == wire::PathKind::shm;
    path.streams = i == 0 && random.chance(1, 2);
    path.traits.loans = i > 0 && random.chance(3, 4);
    path.latency = microseconds(20 + static_cast<int>(random.below(20'000)));
    path.bytes_per_us = static_cast<double>(5 + random.below(500));
    settings.paths.push_back(path);
  }
  const std::uint64_t dialling = random.below(3);
  settings.dials[0] = dialling != 1;
  settings.dials[1] = dialling != 0;
  settings.messages = 20 + static_cast<int>(random.below(120));
  settings.active = milliseconds(500 + static_cast<int>(random.below(5000)));
  settings.mild = random.chance(1, 2);
  settings.long_faults = !settings.mild && random.chance(2, 3);
  settings.crashes = !settings.mild && random.chance(1, 2);
  settings.pauses = !settings.mild && random.chance(1, 2);
  return settings;
}

World::World(std::uint64_t seed, bool trace)
    : simulation(seed, trace), settings(Settings::from(simulation.random)) {
  start(0);
  start(1);
}

std::uint64_t World::run() {
  end_of_faults_ = simulation.now() + settings.active;
  plan_messages();
  plan_faults();
  keep_connected();
  simulation.at(end_of_faults_, [this] { network.chunks_get_stuck = false; });
  // Long enough after the last fault for evictions and for what was held back.
  simulation.run_until(end_of_faults_ + seconds(30));
  check_at_end();
  return simulation.trace.hash();
}

void World::start(int side) {
  const Uid instance = Uid::random(simulation.random);
  processes_[side].push_back(std::make_unique<Process>(*this, side, instance));
}

void World::plan_messages() {
  Random& random = simulation.random;
  std::uint64_t number = 0;
  for (int side = 0; side < 2; ++side) {
    for (int i = 0; i < settings.messages; ++i) {
      Message& message = messages[++number];
      message.number = number;
      message.side = side;
      message.lane = static_cast<std::uint16_t>(random.below(4));
      message.kind = static_cast<std::uint8_t>(1 + random.below(3));
      std::size_t body = 8 + random.below(200);
      if (random.chance(1, 30)) body += random.below(100'000);
      const MutableBuffer bytes = HeapAllocator().allocate(body);
      std::memcpy(bytes.data(), make_bytes(number, body).data(), body);
      std::memcpy(bytes.data(), &number, sizeof number);
      message.payload.body = bytes;
      const std::size_t parts = random.chance(1, 3) ? random.below(4) : 0;
      for (std::size_t part = 0; part < parts; ++part) {
        const std::size_t size = random.chance(1, 2) ? random.below(1000) : random.below(200'000);
        message.payload.parts.push_back(make_bytes(number * 16 + part, size));
        if (size == 0 || random.chance(1, 2)) continue;
        message.lent.insert(static_cast<std::uint32_t>(part));
        if (random.chance(1, 5)) message.unmappable.insert(static_cast<std::uint32_t>(part));
      }
      simulation.after(simulation.between(Duration(0), settings.active), [this, &message, side] {
        message.deadline = simulation.random.chance(1, 2)
                               ? kNever
                               : simulation.now() + simulation.between(Duration(0), seconds(10));
        if (process(side).alive()) process(side).send(message);
      });
    }
  }
}

void World::plan_faults() {
  // Four of half a second each, end to end, and a cut still leave a mild run below evict_after.
  const std::uint64_t faults = simulation.random.below(settings.mild ? 5 : 12);
  for (std::uint64_t i = 0; i < faults; ++i) {
    simulation.after(simulation.between(Duration(0), settings.active), [this] { fault(); });
  }
}

Duration World::fault_duration() {
  if (settings.mild) return simulation.between(milliseconds(1), milliseconds(500));
  return simulation.between(milliseconds(1), settings.long_faults ? seconds(6) : seconds(2));
}

void World::fault() {
  Random& random = simulation.random;
  const std::vector<ConnectionId> working = network.working();
  const std::uint64_t kind = random.below(10);
  const int side = static_cast<int>(random.below(2));
  if (kind < 4 && !working.empty()) {
    const ConnectionId victim = working[random.below(working.size())];
    simulation.note("cut " + std::to_string(victim));
    network.cut(victim);
  } else if (kind < 6 && !working.empty()) {
    const ConnectionId victim = working[random.below(working.size())];
    simulation.note("stall " + std::to_string(victim));
    network.stall(victim, fault_duration());
  } else if (kind == 6) {
    const Duration duration = fault_duration();
    simulation.note("partition");
    partitioned_until = std::max(partitioned_until, simulation.now() + duration);
    for (const ConnectionId connection : working) {
      network.stall(connection, duration);
      if (random.chance(1, 3)) network.cut(connection);
    }
  } else if (kind == 7 && settings.crashes) {
    const bool host_gone = random.chance(1, 4);
    simulation.note("crash of " + std::to_string(side));
    process(side).die(host_gone);
    simulation.after(simulation.between(Duration(0), milliseconds(500)), [this, side] {
      if (!process(side).alive()) start(side);
    });
  } else if (kind == 8 && settings.pauses) {
    simulation.note("pause of " + std::to_string(side));
    process(side).paused_until = simulation.now() + fault_duration();
  } else if (kind == 8 && !settings.mild) {
    simulation.note("session ended by " + std::to_string(side));
    process(side).end_session();
  } else if (kind == 9) {
    simulation.note("calls held by " + std::to_string(side));
    Process& holder = process(side);
    if (!holder.alive()) return;
    holder.hold_calls(true);
    simulation.after(fault_duration(), [&holder] { holder.hold_calls(false); });
  }
}

// Whoever dials looks after its paths again and again.
void World::keep_connected() {
  for (int side = 0; side < 2; ++side) {
    if (!settings.dials[side]) continue;
    Process& from = process(side);
    Process& to = process(1 - side);
    if (!from.alive() || !to.alive() || from.paused_until > simulation.now() ||
        partitioned_until > simulation.now()) {
      continue;
    }
    for (const Path& path : settings.paths) {
      if (from.has_path(path.kind)) continue;
      const auto [ours, theirs] = network.connect(from, to, path);
      to.opened(theirs, path, false);
      from.opened(ours, path, true);
    }
  }
  simulation.after(simulation.between(milliseconds(10), milliseconds(150)),
                   [this] { keep_connected(); });
}

void World::check_at_end() {
  for (const auto& [number, message] : messages) {
    const std::string name = "message " + std::to_string(number);
    if (message.state == Message::State::unsent) continue;  // its sender died, or was refused
    const bool whole = !lost_sessions.contains(message.session) && !dead.contains(message.to);
    require(message.state != Message::State::sent || dead.contains(message.from),
            name + " is neither acknowledged nor lost");
    require(!whole || message.delivered, name + " was not delivered though the session lives");
    const auto of_message = [&message = message](std::uint64_t segment) {
      const auto& segments = message.segments;
      return std::find(segments.begin(), segments.end(), segment) != segments.end();
    };
    require(dead.contains(message.from) || lending.all_back(of_message),
            name + " has lent memory that did not come back");
    require(message.state != Message::State::lost_unwritten || !message.delivered,
            name + " was delivered but is said never to have been written");
    coverage["messages delivered"] += message.delivered ? 1 : 0;
    coverage["messages lost"] += message.state == Message::State::lost ? 1 : 0;
  }
  require(!settings.mild || lost_sessions.empty(),
          "a session was lost by faults that are too short");
  for (const auto& side : processes_) {
    for (const auto& process : side) process->check_at_end();
  }
}

}  // namespace moolink::sim
