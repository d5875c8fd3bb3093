#pragma once

// The whole stack of a group of learners on a message-level network with a virtual clock: the
// group's broker and members, the engine of the rounds, the accumulator's machine and its user.
// Messages are reliable and in order for a pair of peers and a service while both live, at random
// delays; processes crash between any two messages, leave, are stopped, cut off and started again.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "accumulate/machine.h"
#include "collective/engine.h"
#include "common/accounts.h"
#include "common/learner.h"
#include "common/registry.h"
#include "common/simulation.h"
#include "group/broker.h"
#include "group/member.h"

namespace moolink::sim {

struct Setting {
  std::int64_t virtual_batch_size = 4;
  bool sizes_differ = false;  // some peers set another virtual batch size
  std::uint32_t parallel_gradients = 1;
  std::size_t elements = 40;
  Duration share_wait{};
  Duration slowest = milliseconds(3);  // of ordinary messages
};

struct Process {
  int index = 0;
  std::string name;
  Uid instance;
  bool alive = false;
  std::uint64_t incarnation = 0;
  bool leaving = false;  // it ends soon; if it is stopped, once it continues
  bool disturbed =
      false;  // may lose contributions: it or its user was stopped or cut off, or evicted
  Time frozen_until = Time::min();
  Time cut_off_until = Time::min();
  bool lossy = false;  // what was sent while it was cut off is lost
  Time user_away_until = Time::min();
  std::deque<std::function<void()>> backlog;  // of a stopped process
  Time tick_at = kNever;
  int crash_after = -1;  // messages; -1: no crash planned
  std::unique_ptr<group::Broker> broker;
  std::unique_ptr<group::Member> member;
  std::unique_ptr<collective::Engine> engine;
  std::unique_ptr<accumulate::Machine> machine;
  bool made = false;       // until then the machine neither sends nor receives
  group::SharedView view;  // null: none; until then, the view of the group's member
  std::int64_t virtual_batch_size = 0;
  std::unique_ptr<Learner> learner;
  Uid broker_instance;
  Uid lineage;  // of the last view
  std::map<collective::OpId, std::pair<std::uint64_t, std::uint64_t>> reductions;  // epoch, round
};

class World {
 public:
  World(Simulation& simulation, Registry& registry, Setting setting)
      : simulation_(simulation), registry_(registry), setting_(setting) {
    add_process("broker");
  }

  static constexpr int kBroker = 0;
  int add_peer(bool observer, std::uint64_t version);
  void start(int index, bool observer, std::uint64_t version);
  void start_broker();
  void crash(int index);
  void crash_after(int index, int messages) { process(index).crash_after = messages; }
  void leave(int index);
  void freeze(int index, Duration duration);
  void cut_off(int index, Duration duration);
  void send_user_away(int index, Duration duration);
  // Ends all faults; from now on nothing is lost, stopped or slow.
  void heal();
  void stop_contributing() { contributing_ = false; }

  std::vector<int> live() const;
  Process& process(int index) { return *processes_[static_cast<std::size_t>(index)]; }
  int peers() const { return static_cast<int>(processes_.size()) - 1; }
  const LostContributions& lost() const { return lost_; }

 private:
  int add_process(std::string name);
  void on(int index, Duration delay, std::function<void()> action);
  void run(int index, std::uint64_t incarnation, std::function<void()> action);
  void deliver(int from, const Uid& to, int service, std::function<void(int)> action);
  int index_of(const Uid& instance) const;
  void pump(int index);
  bool pump_once(Process& process);
  void do_broker(Process& broker);
  void perform(Process& process, const group::Member::Action& action);
  void perform(Process& process, const collective::Engine::Action& action);
  void perform(Process& process, const accumulate::Action& action);
  void reduce(Process& process, const accumulate::Reduce& reduce);
  bool crashes_now(Process& process);
  void schedule_tick(int index);
  void user_turn(int index);
  void make_machine(int index);
  void connect_broker(int index, Duration delay);
  void tell_down(int observer, int lost, group::Down how, Duration delay);
  void tell_up(int observer, int found, Duration delay);
  void silence(int index, Duration duration);
  bool cut(int a, int b) {
    return process(a).cut_off_until > simulation_.now() ||
           process(b).cut_off_until > simulation_.now();
  }
  Duration latency();

  Simulation& simulation_;
  Registry& registry_;
  Setting setting_;
  bool contributing_ = true;
  bool calm_ = false;
  bool peace_ = true;  // nothing has befallen anybody yet
  std::vector<std::unique_ptr<Process>> processes_;
  std::map<std::tuple<Uid, Uid, int>, Time> last_arrival_;
  LostContributions lost_;
};

}  // namespace moolink::sim
