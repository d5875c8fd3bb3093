#pragma once

// Ranks that share a segment: what they have in common, whatever they pass through it. Each
// announces its sleep, looks once more, sleeps until it is rung, or dies between any two stores.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/time.h"
#include "common/program.h"
#include "common/simulation.h"

namespace moolink::sim {

enum class Sleep : std::uint8_t { awake, announced, asleep };

struct Sleeper {
  bool dead = false;     // or stopped, and taken for dead
  bool stopped = false;  // it wakes up when the others are in the next epoch
  Sleep sleep = Sleep::awake;
  bool rung = false;
  std::vector<std::uint32_t> to_ring;  // found asleep, not rung yet

  // `machine` is the one that this sleeper drives.
  template <class Machine>
  void wake(Machine& machine) {
    sleep = Sleep::awake;
    rung = false;
    machine.awake();
    ++coverage["woken"];
  }
  template <class Machine>
  void look_once_more(Machine& machine) {
    sleep = machine.may_sleep() ? Sleep::asleep : Sleep::awake;
    if (sleep == Sleep::awake) machine.awake();
    ++coverage[sleep == Sleep::asleep ? "asleep" : "sleep given up"];
  }
  template <class Machine>
  void take_wakeups(Machine& machine) {
    for (const std::uint32_t sleeper : machine.take_wakeups()) to_ring.push_back(sleeper);
  }
};

// Ringing is an action of its own: a rank may die before it.
template <class Rank>
bool ring_next(std::vector<Rank>& ranks, Rank& rank) {
  if (rank.to_ring.empty()) return false;
  ranks[rank.to_ring.back()].rung = true;
  rank.to_ring.pop_back();
  return true;
}

// What the worlds of such ranks know beside them.
class SleepersWorld {
 public:
  std::uint64_t hash() const { return trace_.hash(); }

 protected:
  SleepersWorld(std::uint64_t seed, bool print) : seed_(seed), random_(seed), trace_(print) {}

  // The survivors have the proof of it some ticks later.
  void kill(Sleeper& dead) {
    dead.dead = true;
    dead.stopped = random_.chance(1, 2);
    proof_of_death_ = std::min(proof_of_death_, ticks_ + random_.below(300));
  }
  bool proven() const { return ticks_ >= proof_of_death_; }

  void note(std::uint32_t index, const std::string& what, std::uint64_t number) {
    trace_.add(what);
    trace_.add(index);
    trace_.add(number);
    if (trace_.printing()) {
      trace_.print(Time(microseconds(ticks_)),
                   "rank " + std::to_string(index) + " " + what + " " + std::to_string(number));
    }
  }

  std::uint64_t seed_;
  Random random_;
  Trace trace_;
  std::uint64_t ticks_ = 0;

 private:
  std::uint64_t proof_of_death_ = ~std::uint64_t{0};  // the tick at which the survivors have it
};

}  // namespace moolink::sim
