#pragma once

// A simulated job: a broker and peers, each with the whole stack of cpp/, on hosts with shared
// memory and a network between them. What befalls it, a Scenario says.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/accounts.h"
#include "common/network.h"
#include "common/registry.h"
#include "common/simulation.h"
#include "group/view.h"
#include "stack/calls.h"
#include "stack/process.h"
#include "stack/scenario.h"

namespace moolink::sim {

class World {
 public:
  World(Scenario scenario, bool trace);
  std::uint64_t run();

  // For processes.
  Process* listener(const std::string& address);
  Process* running(int number);  // null: it does not run
  Process* find(const Uid& instance);
  bool cut_off(int a, int b) const;
  const Path& path(bool shm) const { return shm ? shm_ : tcp_; }
  // Before a frame is written: what was to happen then.
  void before_frame(Process& writer);
  bool calm() const { return calm_; }
  bool contributing() const { return contributing_; }
  // Nothing has befallen anybody yet.
  bool peace() const { return peace_; }
  // Nothing in this scenario can cost a session, but for the ends of those who are no more.
  bool mild() const { return mild_; }
  // Nor can anybody be late for a new broker.
  bool steady() const { return steady_; }
  // Views of one lineage and number are equal, whoever gets them.
  void check_view(const group::View& view);

  const Scenario scenario;
  Simulation simulation;
  Network network{simulation};
  Registry registry;
  Calls calls;
  LostContributions lost;

 private:
  void start(int number);
  void happen(const Event& event);
  void silence(const Event& event);
  void slow_down(int number, Time until);
  void heal();
  void check_progress();
  void check_at_end();
  std::vector<Process*> peers();
  std::string situation();
  Duration ms(int count) const { return milliseconds(count); }

  Path tcp_;
  Path shm_;
  bool calm_ = false;
  bool contributing_ = true;
  bool peace_ = true;
  bool mild_ = true;
  bool steady_ = true;
  bool counting_ = false;
  std::vector<std::vector<std::unique_ptr<Process>>> processes_;  // incarnations, by number
  std::vector<std::uint64_t> frames_;
  std::map<std::pair<std::uint64_t, Uid>, group::View> views_;  // by (epoch, lineage)
  std::map<std::pair<int, int>, Time> cut_off_until_;
};

}  // namespace moolink::sim
