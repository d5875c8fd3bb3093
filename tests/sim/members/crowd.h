#pragma once

// One group of very many members, on a network that only delivers: what it costs. Every process
// has its group's member, the engine of the rounds and the accumulator's machine, as in
// tests/sim/accumulate; nothing goes wrong but what is asked for.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accumulate/machine.h"
#include "base/buffer.h"
#include "collective/engine.h"
#include "common/simulation.h"
#include "group/broker.h"
#include "group/member.h"

namespace moolink::sim {

// What one thing that the group did has cost.
struct Cost {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::map<std::string, std::uint64_t> by_service;
  std::uint64_t most_sent = 0;    // messages of one member
  std::uint64_t broker_sent = 0;  // the broker's
  double cpu = 0;                 // seconds, of all processes
  double broker_cpu = 0;          // of the broker
  double most_cpu = 0;            // of the busiest member
  Duration took{};                // of simulated time
};

class Crowd {
 public:
  Crowd(int members, std::size_t elements, std::uint64_t seed);

  // Each runs until it is done; throws Violation if that takes too long.
  Cost form();
  Cost rounds(int count);
  Cost idle(Duration duration);
  Cost death();
  // `count` members die at once, and every survivor reports all of them to the broker.
  Cost deaths(int count);
  Cost join();
  int members() const { return static_cast<int>(peers_.size()); }

 private:
  struct Process {
    Uid instance;
    std::string name;
    bool alive = true;
    std::unique_ptr<group::Broker> broker;
    std::unique_ptr<group::Member> member;
    std::unique_ptr<collective::Engine> engine;
    std::unique_ptr<collective::SharedPipeline> pipeline;
    std::vector<Process*> neighbours;  // of the pipeline, by rank
    std::unique_ptr<accumulate::Machine> machine;
    std::map<collective::OpId, std::pair<std::uint64_t, std::uint64_t>> reductions;
    Time tick_at = kNever;
    bool user_turn_due = false;
    std::uint64_t sent = 0;
    double cpu = 0;
  };

  void add_peer();
  Process& kill();
  Cost measure(const std::function<bool()>& done);
  void on(Process& process, Duration delay, std::function<void()> action);
  void deliver(Process& from, const Uid& to, const char* service, std::size_t bytes,
               std::function<void(Process&)> action);
  void arm(Process& process);
  void pump(Process& process);
  bool pump_peer(Process& process);
  bool step(Process& process);
  void enter(Process& process, const accumulate::EnterEpoch& enter);
  void share_memory(Process& process, const collective::EpochMembers& members);
  void user_turn(Process& process);
  void perform(Process& process, group::Member::Action& action);
  void perform(Process& process, collective::Engine::Action& action);
  void perform(Process& process, accumulate::Action& action);
  void reduce(Process& process, accumulate::Reduce& reduction);
  void send_group(Process& from, const Uid& to, const Buffer& bytes);
  bool everybody(const std::function<bool(const Process&)>& holds) const;
  bool in_one_epoch() const;

  Simulation simulation_;
  std::size_t elements_;
  Buffer bucket_;
  bool contributing_ = false;
  Process broker_;
  std::vector<std::unique_ptr<Process>> peers_;
  std::map<Uid, Process*> by_instance_;
  HeapAllocator heap_;
  // Of the newest epoch that any member has entered, by host key; and the members that have.
  std::uint64_t epoch_ = 0;
  std::map<Uid, std::shared_ptr<void>> segments_;
  std::size_t entered_ = 0;
  Cost cost_;
};

}  // namespace moolink::sim
