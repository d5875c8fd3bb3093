#include "stack/world.h"

#include <algorithm>
#include <utility>

#include "common/program.h"

namespace moolink::sim {

namespace {

using Kind = Event::Kind;

constexpr Duration kLeft = milliseconds(60);  // after which who leaves has ended
constexpr Duration kFramesCome = milliseconds(500);
constexpr Duration kProgressWithin = seconds(2);
constexpr std::uint64_t kRoundsMeanwhile = 3;

}  // namespace

World::World(Scenario of, bool trace)
    : scenario(std::move(of)),
      simulation(scenario.seed, trace),
      registry(scenario.batch, scenario.elements) {
  Random& random = simulation.random;
  tcp_.kind = wire::PathKind::tcp;
  tcp_.traits.chunk_bytes = std::size_t{1} << (12 + random.below(5));
  tcp_.latency = microseconds(50 + static_cast<int>(random.below(2000)));
  tcp_.bytes_per_us = static_cast<double>(50 + random.below(500));
  shm_.kind = wire::PathKind::shm;
  shm_.traits = {true, std::size_t{1} << 16, 1};
  shm_.traits.standing_grants = true;
  shm_.latency = microseconds(5);
  network.chunks_get_stuck = scenario.pause == 0;
  processes_.resize(static_cast<std::size_t>(scenario.processes()));
  frames_.resize(processes_.size());
  const auto any_of = [this](auto holds) {
    return std::any_of(scenario.events.begin(), scenario.events.end(), holds);
  };
  mild_ = !any_of(Scenario::disturbs);
  // While a broker gathers announcements, who is not heard for a moment may come too late.
  steady_ = mild_ && !(any_of([](const Event& event) { return event.process == 0; }) &&
                       any_of([](const Event& event) {
                         return event.kind == Kind::isolate || event.kind == Kind::split ||
                                event.kind == Kind::slow || event.kind == Kind::stop;
                       }));
}

// --- processes -----------------------------------------------------------------------------------

Process* World::running(int number) {
  const auto& incarnations = processes_[static_cast<std::size_t>(number)];
  if (incarnations.empty() || !incarnations.back()->alive()) return nullptr;
  return incarnations.back().get();
}

Process* World::find(const Uid& instance) {
  for (const auto& incarnations : processes_) {
    for (const auto& process : incarnations) {
      if (process->instance == instance) return process.get();
    }
  }
  return nullptr;
}

// Who has lived last at an address, dead or alive.
Process* World::listener(const std::string& address) {
  for (const auto& incarnations : processes_) {
    if (incarnations.empty()) continue;
    const std::vector<std::string> own = incarnations.back()->addresses();
    if (std::find(own.begin(), own.end(), address) != own.end()) return incarnations.back().get();
  }
  return nullptr;
}

std::vector<Process*> World::peers() {
  std::vector<Process*> living;
  for (int number = 1; number < scenario.processes(); ++number) {
    Process* process = running(number);
    if (process != nullptr && process->staying()) living.push_back(process);
  }
  return living;
}

void World::start(int number) {
  if (running(number) != nullptr) return;
  auto& incarnations = processes_[static_cast<std::size_t>(number)];
  incarnations.push_back(std::make_unique<Process>(*this, number, Uid::random(simulation.random)));
  incarnations.back()->start();
}

bool World::cut_off(int a, int b) const {
  const auto found = cut_off_until_.find(std::minmax(a, b));
  return found != cut_off_until_.end() && found->second > simulation.now();
}

// --- what happens --------------------------------------------------------------------------------

std::uint64_t World::run() {
  start(0);
  for (int number = 1; number <= scenario.initial; ++number) {
    simulation.after(simulation.between(Duration(0), ms(500)), [this, number] { start(number); });
  }
  simulation.run_until(simulation.now() + ms(scenario.form));
  counting_ = true;
  if (scenario.pause > 0) {
    for (Process* peer : peers()) peer->watch_pauses();
  }
  int last = 0;
  for (const Event& event : scenario.events) {
    if (event.frames_of >= 0) continue;
    last = std::max(last, event.at_ms + event.ms);
    simulation.after(ms(event.at_ms), [this, event] { happen(event); });
  }
  simulation.run_until(simulation.now() + ms(last));
  for (const Event& event : scenario.events) {  // frames may take a while to come
    if (event.frames_of >= 0) simulation.run_until(simulation.now() + kFramesCome + ms(event.ms));
  }
  heal();
  simulation.run_until(simulation.now() + ms(scenario.settle));
  check_progress();
  contributing_ = false;
  simulation.run_until(simulation.now() + seconds(2));
  check_at_end();
  return simulation.trace.hash();
}

void World::before_frame(Process& writer) {
  if (!counting_) return;
  const std::uint64_t count = ++frames_[static_cast<std::size_t>(writer.number)];
  for (const Event& event : scenario.events) {
    if (calm_ || event.frames_of != writer.number || event.frames != count) continue;
    const bool own_end =
        event.process == writer.number && (event.kind == Kind::crash || event.kind == Kind::vanish);
    if (own_end) {
      ++coverage["crashes between frames"];
      happen(event);
    } else {
      simulation.at(simulation.now(), [this, event] { happen(event); });
    }
  }
}

void World::happen(const Event& event) {
  if (calm_) return;
  peace_ = false;
  if (event.kind == Kind::start) return start(event.process);
  Process* process = running(event.process);
  if (process == nullptr) return;
  simulation.note(process->name + ": event " + std::to_string(static_cast<int>(event.kind)) + " " +
                  std::to_string(event.ms));
  switch (event.kind) {
    case Kind::crash:
    case Kind::vanish:
      ++coverage[process->is_broker() ? "broker crashes" : "crashes"];
      return process->die(event.kind == Kind::vanish);
    case Kind::leave:
      if (!process->is_broker()) process->leave();
      return;
    case Kind::stop:
      process->stop(ms(event.ms));
      break;
    case Kind::isolate:
    case Kind::split:
      return silence(event);
    case Kind::cut:
      if (Process* other = running(event.other)) network.cut_between(*process, *other);
      return;
    case Kind::slow:
      return slow_down(event.process, simulation.now() + ms(event.ms));
    case Kind::away:
      if (!process->is_broker()) process->send_user_away(ms(event.ms));
      break;
    case Kind::start:
      break;
  }
  if (Scenario::disturbs(event)) process->disturbed = true;
}

// Nothing gets through between some processes; what is under way waits, if the sessions last.
void World::silence(const Event& event) {
  for (int other = 0; other < scenario.processes(); ++other) {
    const bool meant = event.kind == Kind::isolate || other == event.other;
    if (!meant || other == event.process) continue;
    Time& until = cut_off_until_[std::minmax(event.process, other)];
    until = std::max(until, simulation.now() + ms(event.ms));
    Process* process = running(event.process);
    Process* peer = running(other);
    if (peer == nullptr) continue;
    network.stall_between(*process, *peer, ms(event.ms));
    if (!Scenario::disturbs(event)) continue;
    process->disturbed = true;
    if (event.kind == Kind::split) peer->disturbed = true;
  }
}

// Everything to and from it is late, again and again.
void World::slow_down(int number, Time until) {
  Process* process = running(number);
  if (process == nullptr || calm_ || simulation.now() >= until) return;
  network.stall_all_of(*process, simulation.between(milliseconds(1), milliseconds(60)));
  simulation.after(milliseconds(70), [this, number, until] { slow_down(number, until); });
}

// The weather clears; whoever is alive then must get on, with all others that are.
void World::heal() {
  calm_ = true;
  network.chunks_get_stuck = false;
  simulation.note("calm");
  start(0);
  const std::vector<Process*> living = peers();
  const bool members = std::any_of(living.begin(), living.end(), [](const Process* peer) {
    return !peer->learner().habits().observer;
  });
  if (!members) simulation.after(kLeft, [this] { start(1); });
}

// --- what must be true ---------------------------------------------------------------------------

void World::check_view(const group::View& view) {
  const auto [known, first] = views_.try_emplace({view.epoch, view.lineage}, view);
  require(first || known->second == view,
          "two views of one epoch: " + group::describe(known->second) + " and " +
              group::describe(view));
}

void World::check_progress() {
  std::map<Process*, std::uint64_t> before;
  for (Process* peer : peers()) {
    require(peer->machine().connected(), peer->name + " is not connected" + situation());
    before[peer] = peer->learner().applied();
  }
  simulation.run_until(simulation.now() + kProgressWithin);
  for (const auto& [peer, applied] : before) {
    require(peer->learner().applied() >= applied + kRoundsMeanwhile,
            peer->name + " makes no progress" + situation());
    require(scenario.pause == 0 || peer->longest_pause() <= ms(scenario.pause),
            peer->name + " saw no round for " +
                std::to_string(peer->longest_pause() / milliseconds(1)) + " ms" + situation());
  }
}

void World::check_at_end() {
  std::vector<Account> accounts;
  for (Process* peer : peers()) {
    accounts.push_back({peer->name, &peer->learner(), peer->disturbed});
  }
  check_histories(registry, accounts);
  check_contributions(registry, accounts, lost);
  calls.check_at_end(simulation.now(), [this](const Uid& instance) {
    const Process* process = find(instance);
    return process != nullptr && process->alive();
  });
}

std::string World::situation() {
  std::string text;
  for (Process* peer : peers()) text += "; " + peer->waiting_for();
  return text;
}

}  // namespace moolink::sim
