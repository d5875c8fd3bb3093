// Random lives of a group of learners, and what must be true at their ends.

#include <cstdint>
#include <string>
#include <vector>

#include "accumulate/world.h"
#include "common/accounts.h"
#include "common/program.h"

namespace moolink::sim {
namespace {

class Life {
 public:
  Life(std::uint64_t seed, bool trace)
      : simulation_(seed, trace),
        setting_(make_setting(simulation_.random)),
        registry_(setting_.virtual_batch_size, setting_.elements),
        world_(simulation_, registry_, setting_),
        long_silences_(simulation_.random.chance(1, 3)) {}

  std::uint64_t run() {
    world_.start_broker();
    const std::uint64_t peers = 1 + below(6);
    for (std::uint64_t i = 0; i < peers; ++i) {
      simulation_.after(between(0, 1500), [this, i] { add_peer(i == 0); });
    }
    if (below(4) == 0) simulation_.run_until(simulation_.now() + seconds(8));  // peace at first
    const Time stormy_until = simulation_.now() + between(3000, 9000);
    while (simulation_.now() < stormy_until) {
      simulation_.run_until(simulation_.now() + between(20, 900));
      misfortune();
    }
    calm();
    check_progress();
    world_.stop_contributing();
    simulation_.run_until(simulation_.now() + seconds(2));
    check_histories(registry_, accounts());
    check_contributions(registry_, accounts(), world_.lost());
    return simulation_.trace.hash();
  }

 private:
  std::uint64_t below(std::uint64_t bound) { return simulation_.random.below(bound); }
  Duration between(int low, int high) {
    return simulation_.between(milliseconds(low), milliseconds(high));
  }

  static Setting make_setting(Random& random) {
    Setting setting;
    setting.virtual_batch_size = 1 + static_cast<std::int64_t>(random.below(12));
    setting.sizes_differ = random.chance(1, 4);
    setting.parallel_gradients = 1 + static_cast<std::uint32_t>(random.below(3));
    setting.elements = random.chance(1, 2) ? 16 : random.chance(9, 10) ? 700 : 9000;
    setting.share_wait = random.chance(1, 2) ? Duration(0) : milliseconds(50);
    setting.slowest = milliseconds(random.chance(1, 2) ? 2 : 15);
    return setting;
  }

  void add_peer(bool surely_member) {
    const bool observer = !surely_member && below(6) == 0;
    world_.add_peer(observer, below(3) == 0 ? below(5) : 0);
  }

  // In some lives most silences are long enough for an eviction.
  bool is_long() { return below(6) < (long_silences_ ? 5 : 1); }

  int someone() {
    const std::vector<int> live = world_.live();
    return live.empty() ? -1 : live[static_cast<std::size_t>(below(live.size()))];
  }

  void misfortune() {
    const int peer = someone();
    const std::uint64_t kind = below(100);
    if (peer < 0 || (kind < 15 && world_.live().size() < 6)) {
      add_peer(peer < 0);
    } else if (kind < 40) {
      world_.crash_after(peer, static_cast<int>(below(60)));
    } else if (kind < 50) {
      world_.crash(peer);
    } else if (kind < 58) {
      world_.leave(peer);
    } else if (kind < 70) {
      world_.freeze(peer, is_long() ? between(3200, 5000) : between(20, 1500));
    } else if (kind < 80) {
      world_.cut_off(peer, is_long() ? between(2800, 5000) : between(20, 1500));
    } else if (kind < 88) {
      world_.send_user_away(peer, below(4) == 0 ? between(2200, 4000) : between(50, 900));
    } else if (kind < 92) {
      world_.crash(World::kBroker);
      simulation_.after(between(10, 2500), [this] { world_.start_broker(); });
    } else if (kind < 96) {
      const auto peers = static_cast<std::uint64_t>(world_.peers());
      world_.start(1 + static_cast<int>(below(peers)), false, 0);
    } else {
      // Epochs change while no round is made.
      const Duration duration = between(500, is_long() ? 6000 : 1000);
      for (const int other : world_.live()) world_.send_user_away(other, duration);
    }
  }

  // The weather clears; whoever is alive then must get on, with all others that are.
  void calm() {
    world_.start_broker();
    world_.heal();
    simulation_.run_until(simulation_.now() + milliseconds(200));
    bool members = false;
    for (const int peer : world_.live()) {
      const Process& process = world_.process(peer);
      members |= !process.leaving && !process.learner->habits().observer;
    }
    if (!members) add_peer(true);
    simulation_.run_until(simulation_.now() + seconds(14));
    world_.start_broker();
  }

  void check_progress() {
    std::map<int, std::uint64_t> versions;
    for (const int peer : world_.live()) {
      const Process& process = world_.process(peer);
      require(process.machine->connected(), process.name + " is not connected" + situation());
      versions[peer] = process.learner->applied();
    }
    simulation_.run_until(simulation_.now() + seconds(2));
    for (const auto& [peer, applied] : versions) {
      const Process& process = world_.process(peer);
      require(process.learner->applied() >= applied + 3,
              process.name + " makes no progress" + situation());
    }
  }

  std::vector<Account> accounts() {
    std::vector<Account> accounts;
    for (const int peer : world_.live()) {
      const Process& process = world_.process(peer);
      accounts.push_back({process.name, process.learner.get(), process.disturbed});
    }
    return accounts;
  }

  // Who waits for whom.
  std::string situation() {
    std::string text;
    for (const int peer : world_.live()) {
      const Process& process = world_.process(peer);
      text += "; " + process.name + " in epoch " + std::to_string(process.machine->epoch()) +
              " at version " + std::to_string(process.learner->version()) + " waits for";
      for (const std::string& name : process.machine->waiting_for()) text += " " + name;
      if (process.machine->wants_state()) text += " set_state";
      text += process.member->waiting_for();
    }
    return text;
  }

  Simulation simulation_;
  Setting setting_;
  Registry registry_;
  World world_;
  bool long_silences_;
};

}  // namespace
}  // namespace moolink::sim

int main(int argc, char** argv) {
  return moolink::sim::run_program(argc, argv, "accumulate", [](std::uint64_t seed, bool trace) {
    return moolink::sim::Life(seed, trace).run();
  });
}
