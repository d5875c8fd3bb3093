#pragma once

// What befalls a simulated job, as a text that a person or a program can write and make smaller:
//
//   seed 7          of delays, and of what users do
//   roles MMO       of processes 1, 2, ...: members and observers; 0 is the broker
//   initial 2       processes that run from the beginning
//   hosts 1         that they are on; the broker is on the first
//   batch 4         the virtual batch size
//   parallel 1      rounds under way
//   elements 16     of a bucket
//   share_wait 50   ms; 0: members do not wait for each other's share
//   late 1          whether some accumulators are made long after their groups
//   calls 1         whether processes call each other meanwhile
//   form 0          ms before everything below, in peace
//   settle 14000    ms after the last event, until everybody must get on
//   pause 0         ms; if above 0: the longest time without a round that a member may see
//   at 1200 crash 2        1,200 ms after that
//   frame 0 37 crash 0     instead of process 0's 37th frame after that
//
// Events: start P, crash P (its system closes its connections), vanish P (nothing is heard any
// more), leave P, stop P MS, isolate P MS, split P Q MS, cut P Q (their connections break),
// slow P MS, away P MS (its user).

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/random.h"

namespace moolink::sim {

struct Event {
  enum class Kind : std::uint8_t {
    start,
    crash,
    vanish,
    leave,
    stop,
    isolate,
    split,
    cut,
    slow,
    away
  };
  Kind kind = Kind::crash;
  int process = 0;
  int other = 0;             // of split and cut
  int ms = 0;                // how long it lasts
  int at_ms = 0;             // when, or
  int frames_of = -1;        // instead of a frame of this process:
  std::uint64_t frames = 0;  // its how manieth
};

struct Scenario {
  std::uint64_t seed = 0;
  std::string roles = "MM";
  int initial = 2;
  int hosts = 1;
  std::int64_t batch = 4;
  std::uint32_t parallel = 1;
  std::size_t elements = 16;
  int share_wait = 50;
  bool late = false;
  bool calls = false;
  int form = 0;
  int settle = 14000;
  int pause = 0;
  std::vector<Event> events;

  int processes() const { return static_cast<int>(roles.size()) + 1; }
  // Whether a process can lose a session by it: then it may lose what it contributed, too.
  static bool disturbs(const Event& event);

  std::string text() const;
  static Scenario parse(const std::string& text);  // throws std::invalid_argument
  static Scenario random(std::uint64_t seed);
};

}  // namespace moolink::sim
