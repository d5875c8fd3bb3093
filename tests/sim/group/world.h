#pragma once

// A message-level network with peers and one broker on a virtual clock. Links are reliable and in
// order while both instances live; they are slow at random, stall when partitioned, and lose what
// they held when a partition was long. Processes crash, leave, are stopped and continued.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/time.h"
#include "common/simulation.h"
#include "group/broker.h"
#include "group/member.h"

namespace moolink::sim {

struct WorldOptions {
  bool stateful = false;
  bool hold_soft_views = false;  // as an accumulator does; activated some time later
  int reconnect_ms = 300;        // at most, to dial a broker that came up
  int proof_of_death = 85;       // percent of survivors that learn of a crash by proof
};

struct Process {
  int index = 0;
  std::string name;
  Uid instance;
  bool alive = false;
  std::uint64_t incarnation = 0;
  Time frozen_until = Time::min();
  std::vector<std::function<void()>> backlog;  // what happens to it on waking, in order
  Time tick_at = kNever;
  std::unique_ptr<group::Member> member;
  std::unique_ptr<group::Broker> broker;
  bool observer = false;
  Uid connected;                 // the broker instance the member was told of
  Uid truth;                     // lineage whose state this process really holds
  std::uint64_t last_epoch = 0;  // of this instance, for the check that epochs rise
  int evictions = 0;             // of this instance
  Time evicted_at;
  std::uint64_t frames_applied = 0;
  std::uint64_t lost_session_in = 0;  // epoch: what was sent in it between two members may be gone
};

class World {
 public:
  static constexpr int kBroker = 0;  // index of the broker's process; peers are 1 .. peers()

  World(std::uint64_t seed, WorldOptions options, bool trace);

  Time now() const { return now_; }
  Random& random() { return random_; }
  Duration ms(std::uint64_t low, std::uint64_t high) {
    return milliseconds(low + random_.below(high - low + 1));
  }
  int peers() const { return static_cast<int>(processes_.size()) - 1; }
  Process& process(int index) { return *processes_.at(static_cast<std::size_t>(index)); }
  const WorldOptions& options() const { return options_; }
  std::uint64_t trace_hash() const { return trace_.hash(); }

  void run_for(Duration duration);
  void at(Duration delay, std::function<void()> action);

  // Faults and other happenings, from now on.
  int add_peer(bool observer = false);  // its process, started
  void start(int index);                // a new instance
  void crash(int index);
  void leave(int index);
  void freeze(int index, Duration duration);
  void partition(int a, int b, Duration duration);
  void isolate(int index, Duration duration);
  void heal();  // ends every partition and freeze

  // Empty when every live peer is active in one view that holds exactly the live peers, has the
  // state, and the broker agrees; otherwise what is wrong.
  std::string disagreement();
  std::vector<int> live_peers() const;

 private:
  struct Event {
    Time time;
    std::uint64_t sequence;
    int process;  // -1: of the world itself
    std::uint64_t incarnation;
    std::function<void()> action;
    bool operator>(const Event& other) const {
      return std::tie(time, sequence) > std::tie(other.time, other.sequence);
    }
  };
  struct Link {
    Time blocked_until = Time::min();
    bool lossy = false;
    Time last_delivery = Time::min();            // of messages in this direction
    std::vector<std::function<void()>> stalled;  // their arrival, in order
  };

  void push(Time time, int process, std::function<void()> action);
  void on(int process, Duration delay, std::function<void()> action);
  void fire(Event event);
  void deliver(int from, int to, const Uid& to_instance, std::string_view kind,
               std::function<void()> action);
  void release(int from, int to);
  void wake(int index);
  Link& link(int from, int to) { return links_[{from, to}]; }
  bool blocked(int a, int b) { return link(a, b).blocked_until > now_; }
  int index_of(const Uid& instance) const;

  void pump(int index);
  void pump_member(Process& process);
  void pump_broker(Process& process);
  void schedule_tick(Process& process);
  void connect_broker(int index, Duration delay);
  void tell_down(int observer, int lost, group::Down how, Duration delay);
  void tell_down(int observer, int lost, const Uid& instance, group::Down how, Duration delay);
  void tell_up(int observer, int found, Duration delay);
  void send_frames(int index);
  void receive_frame(int index, int from, const group::View& sent_in);
  void receive_group(int index, const Uid& from, const Buffer& bytes);
  void seek_state(int index);
  void check_view(Process& process, const group::View& view);
  void check_process(Process& process);
  void note(int process, std::string_view what, std::uint64_t detail = 0);

  Random random_;
  WorldOptions options_;
  Time now_{seconds(1000)};
  std::uint64_t sequence_ = 0;
  Trace trace_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::map<std::pair<int, int>, Link> links_;
  std::map<std::pair<std::uint64_t, Uid>, group::View> known_views_;  // by (epoch, lineage)
};

}  // namespace moolink::sim
