// What happens to the group, chosen by the seed: one fault at a time with its time bound, or many
// at once with the invariants of world.cc and agreement after things have calmed down.

#include "group/scenarios.h"

#include <array>
#include <string>

#include "common/simulation.h"
#include "group/world.h"

namespace moolink::sim {
namespace {

using group::View;

int random_peer(World& world) {
  const auto live = world.live_peers();
  return live[world.random().below(live.size())];
}

void expect_agreement(World& world, const std::string& when) {
  if (const std::string why = world.disagreement(); !why.empty()) {
    throw Violation(when + ": " + why);
  }
}

const View& view_of(World& world, int peer) { return *world.process(peer).member->active_view(); }

// A broker and some peers that have found each other.
void form(World& world, std::uint64_t least, std::uint64_t most) {
  world.start(World::kBroker);
  const std::uint64_t peers = least + world.random().below(most - least + 1);
  for (std::uint64_t i = 0; i < peers; ++i) world.add_peer();
  world.run_for(seconds(4));
  expect_agreement(world, "4 s after the start");
}

void one_dies(World& world) {
  form(world, 2, 6);
  world.crash(random_peer(world));
  world.run_for(milliseconds(1050));
  if (world.options().stateful) world.run_for(seconds(1));  // a new lineage elects its first holder
  expect_agreement(world, "1 s after a death was proven");
}

void one_leaves(World& world) {
  form(world, 2, 6);
  world.leave(random_peer(world));
  world.run_for(milliseconds(1100));
  if (world.options().stateful) world.run_for(seconds(1));
  expect_agreement(world, "1 s after a peer left");
}

void some_join(World& world) {
  form(world, 1, 4);
  const Uid lineage = view_of(world, 1).lineage;
  for (std::uint64_t i = world.random().below(3) + 1; i > 0; --i) {
    world.at(world.ms(0, 200), [&world] { world.add_peer(world.random().chance(1, 3)); });
  }
  world.run_for(milliseconds(2200));
  expect_agreement(world, "2 s after the last join");
  require(view_of(world, 1).lineage == lineage, "a join made a new lineage");
}

// Without a broker nothing stops, and its return changes nothing.
void broker_restarts(World& world) {
  form(world, 2, 6);
  const View before = view_of(world, 1);
  world.crash(World::kBroker);
  world.run_for(milliseconds(300));
  std::vector<std::uint64_t> applied;
  for (const int peer : world.live_peers()) applied.push_back(world.process(peer).frames_applied);
  world.run_for(world.ms(4000, 8000));
  for (const int peer : world.live_peers()) {
    require(view_of(world, peer) == before, "the view changed without a broker");
    const auto index = static_cast<std::size_t>(peer) - 1;
    require(world.process(peer).frames_applied > applied[index],
            "operations stopped without a broker");
  }
  world.start(World::kBroker);
  world.run_for(seconds(3));
  expect_agreement(world, "3 s after the broker's return");
  require(view_of(world, 1) == before, "the broker's return changed the view");
}

void broker_restarts_into_change(World& world) {
  form(world, 2, 5);
  const Uid lineage = view_of(world, 1).lineage;
  world.crash(World::kBroker);
  world.run_for(world.ms(100, 3000));
  const int joined = world.add_peer();
  if (world.random().chance(1, 2) && world.peers() > 3) world.crash(joined - 1);
  world.at(world.ms(0, 1000), [&world] { world.start(World::kBroker); });
  world.run_for(seconds(9));
  expect_agreement(world, "8 s after the broker's return");
  require(view_of(world, 1).lineage == lineage, "the broker's return made a new lineage");
  require(world.process(1).evictions == 0, "the broker's return evicted a live member");
}

// A broker founds a lineage with a new peer before the old members find it, and restarts. The next
// broker hears of both lineages, in any order.
void broker_restarts_twice(World& world) {
  form(world, 1, 3);
  const Uid lineage = view_of(world, 1).lineage;
  const int old_members = world.peers();
  world.crash(World::kBroker);
  for (const int peer : world.live_peers()) {
    world.partition(World::kBroker, peer, world.ms(1500, 3500));
  }
  world.start(World::kBroker);
  world.add_peer();
  world.run_for(world.ms(1200, 2500));
  world.crash(World::kBroker);
  world.at(world.ms(20, 1000), [&world] { world.start(World::kBroker); });
  world.run_for(seconds(16));
  expect_agreement(world, "16 s after a broker restarted twice");
  require(view_of(world, 1).lineage == lineage, "the lineage of live holders ended");
  for (int peer = 1; peer <= old_members; ++peer) {
    require(world.process(peer).evictions == 0, "a broker that restarted evicted a live member");
  }
}

void stopped_shortly(World& world) {
  form(world, 2, 5);
  const View before = view_of(world, 1);
  world.freeze(
      static_cast<int>(world.random().below(static_cast<std::uint64_t>(world.peers()) + 1)),
      world.ms(1000, 2000));
  world.run_for(seconds(5));
  expect_agreement(world, "after a stop of 2 s");
  const View& after = view_of(world, 1);  // another epoch, if sessions were lost
  require(after.lineage == before.lineage && after.members.size() == before.members.size(),
          "a stop of 2 s changed the members");
  for (const int peer : world.live_peers()) {
    require(world.process(peer).evictions == 0, "a stop of 2 s evicted a member");
  }
}

void stopped_long(World& world) {
  form(world, 2, 5);
  const int frozen = random_peer(world);
  const Duration duration = world.ms(4000, 8000);
  world.freeze(frozen, duration);
  world.run_for(duration + milliseconds(3000));
  expect_agreement(world, "3 s after a stopped member woke");
  require(world.process(frozen).evictions == 1,
          "a member that was silent too long was not evicted");
}

// The only one who has the state is stopped while others come: they must not begin without it.
void last_holder_stopped(World& world) {
  form(world, 1, 1);
  const Uid lineage = view_of(world, 1).lineage;
  const Duration duration = world.ms(4000, 8000);
  world.freeze(1, duration);
  for (std::uint64_t i = world.random().below(3) + 1; i > 0; --i) world.add_peer();
  world.run_for(duration + seconds(4));
  expect_agreement(world, "4 s after the last holder woke");
  if (world.options().stateful) {
    require(view_of(world, 1).lineage == lineage, "the state was lost though its holder lived");
  }
}

void two_lose_each_other(World& world) {
  form(world, 2, 4);
  const Uid lineage = view_of(world, 1).lineage;
  const int a = random_peer(world);
  const int b = a == 1 ? 2 : a - 1;
  const Duration duration = world.ms(4000, 8000);
  world.partition(a, b, duration);
  world.run_for(duration + seconds(4));
  expect_agreement(world, "4 s after the path between two members came back");
  require(view_of(world, a).lineage == lineage,
          "two members lost each other and both were evicted");
  require(world.process(a).evictions == 0 || world.process(b).evictions == 0,
          "both of two members that lost each other were evicted");
}

void cut_off_from_broker(World& world) {
  form(world, 2, 5);
  const Uid lineage = view_of(world, 1).lineage;
  const Duration duration = world.ms(4000, 9000);
  for (const int peer : world.live_peers()) world.partition(World::kBroker, peer, duration);
  world.run_for(duration + seconds(4));
  expect_agreement(world, "4 s after the broker was reached again");
  require(view_of(world, 1).lineage == lineage, "a broker that was cut off made a new lineage");
}

// The broker's last view reaches few, the next broker hears of it late or never.
void last_view_unseen(World& world) {
  form(world, 3, 4);
  const int unaware = random_peer(world);
  world.partition(World::kBroker, unaware, world.ms(200, 1200));
  world.crash(unaware == 1 ? 2 : unaware - 1);
  world.run_for(world.ms(5, 60));
  world.crash(World::kBroker);
  world.run_for(world.ms(20, 400));
  world.start(World::kBroker);
  world.at(world.ms(0, 600), [&world] { world.add_peer(); });
  world.at(world.ms(0, 3000), [&world] { world.add_peer(); });
  world.run_for(seconds(16));
  expect_agreement(world, "16 s after a broker died with its view unseen");
}

void one_is_demoted(World& world) {
  form(world, 2, 5);
  const std::uint64_t epoch = view_of(world, 1).epoch;
  const Uid lineage = view_of(world, 1).lineage;
  world.process(1).member->ask_demotion(world.now(), world.process(2).instance);
  world.run_for(milliseconds(2500));
  expect_agreement(world, "after a demotion");
  require(view_of(world, 1).epoch > epoch, "a demotion made no epoch");
  require(view_of(world, 1).lineage == lineage, "a demotion made a new lineage");
  const auto* demoted = view_of(world, 1).find(world.process(2).instance);
  require(demoted != nullptr && (!world.options().stateful || demoted->since > epoch),
          "who was demoted is not a newcomer");
}

// ---- many faults at once

class Chaos {
 public:
  explicit Chaos(World& world) : world_(world), steady_(world.random().chance(1, 2)) {}

  void run() {
    Random& random = world_.random();
    world_.start(World::kBroker);
    for (std::uint64_t i = random.below(6) + 1; i > 0; --i) world_.add_peer();
    if (steady_) world_.run_for(seconds(4));
    if (steady_) lineage_ = view_of(world_, 1).lineage;
    for (std::uint64_t i = random.below(12) + 3; i > 0; --i) {
      happen();
      world_.run_for(world_.ms(0, 1500));
      check_steady();
    }
    world_.heal();
    world_.start(World::kBroker);
    world_.run_for(seconds(16));
    check_steady();
    expect_agreement(world_, "16 s after the last fault");
    const auto live = world_.live_peers();
    if (live.empty()) return;
    const View calm = view_of(world_, live.front());
    world_.run_for(seconds(2));
    require(view_of(world_, live.front()) == calm, "the view changes though nothing happens");
  }

 private:
  // A peer that faults may hit: not the steady one.
  int victim() {
    const auto first = static_cast<std::uint64_t>(steady_ ? 2 : 1);
    const auto peers = static_cast<std::uint64_t>(world_.peers());
    if (peers < first) return world_.add_peer();
    return static_cast<int>(first + world_.random().below(peers - first + 1));
  }

  void happen() {
    const int peer = victim();
    switch (world_.random().below(12)) {
      case 0:
        world_.add_peer(world_.random().chance(1, 4));
        break;
      case 1:
        world_.crash(peer);
        break;
      case 2:
      case 3:
        world_.crash(peer);
        world_.at(world_.ms(20, 2000), [this, peer] { world_.start(peer); });
        break;
      case 4:
        world_.leave(peer);
        break;
      case 5:
      case 6:
        world_.freeze(peer, world_.ms(200, 6000));
        break;
      case 7:
        world_.partition(peer, partner(peer), world_.ms(100, 6000));
        break;
      case 8:
        isolate(peer);
        break;
      case 9:
        world_.crash(World::kBroker);
        world_.at(world_.ms(50, 4000), [this] { world_.start(World::kBroker); });
        break;
      case 10:
        world_.freeze(World::kBroker, world_.ms(200, 5000));
        break;
      case 11:
        tell_member(peer);
        break;
      default:
        break;
    }
  }

  int partner(int peer) {
    const int other = world_.random().chance(1, 2) ? World::kBroker : victim();
    return other == peer ? World::kBroker : other;
  }

  // The steady peer's links stay whole: it would be the one suspected by everybody otherwise.
  void isolate(int peer) {
    const Duration duration = world_.ms(100, 6000);
    for (int other = 0; other <= world_.peers(); ++other) {
      if (other != peer && !(steady_ && other == 1)) world_.partition(peer, other, duration);
    }
  }

  void tell_member(int peer) {
    Process& process = world_.process(peer);
    if (!process.alive || world_.now() < process.frozen_until) return;
    if (world_.random().chance(1, 2)) {
      process.member->set_sort_order(world_.now(),
                                     static_cast<std::int64_t>(world_.random().below(5)) - 2);
    } else {
      process.member->ask_demotion(world_.now(), world_.process(victim()).instance);
    }
  }

  void check_steady() {
    if (!steady_) return;
    require(world_.process(1).evictions == 0, "a member without any fault was evicted");
    require(view_of(world_, 1).lineage == lineage_, "the lineage of a live holder ended");
  }

  World& world_;
  bool steady_;
  Uid lineage_;
};

void chaos(World& world) { Chaos(world).run(); }

constexpr std::array kScenarios = {one_dies,
                                   one_leaves,
                                   some_join,
                                   broker_restarts,
                                   broker_restarts_into_change,
                                   broker_restarts_twice,
                                   stopped_shortly,
                                   stopped_long,
                                   last_holder_stopped,
                                   two_lose_each_other,
                                   cut_off_from_broker,
                                   last_view_unseen,
                                   one_is_demoted};

}  // namespace

std::uint64_t run_seed(std::uint64_t seed, bool trace) {
  Random choice(seed * 0x9e3779b97f4a7c15ULL);
  WorldOptions options;
  options.stateful = choice.chance(1, 2);
  options.hold_soft_views = options.stateful && choice.chance(1, 2);
  const bool calm = choice.chance(1, 2);
  const auto scenario = calm ? kScenarios[choice.below(kScenarios.size())] : chaos;
  if (scenario == one_dies) options.proof_of_death = 100;
  if (scenario == last_view_unseen || (!calm && choice.chance(1, 4))) options.reconnect_ms = 2500;
  World world(choice.next(), options, trace);
  scenario(world);
  return world.trace_hash();
}

}  // namespace moolink::sim
