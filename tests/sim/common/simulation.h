#pragma once

// A virtual clock with its events, the seed's generator and the trace of one simulated run.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/random.h"
#include "base/time.h"

namespace moolink::sim {

// A broken invariant ends the run.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw Violation(otherwise);
}

// What happened, in order, as one number: the same seed must give the same one.
class Trace {
 public:
  explicit Trace(bool print) : print_(print) {}

  bool printing() const { return print_; }
  std::uint64_t hash() const { return hash_; }
  void add(std::uint64_t value) {
    hash_ ^= value;
    hash_ *= 0x100000001b3ULL;  // FNV-1a over 64-bit words, with a final mix below
    hash_ ^= hash_ >> 29;
  }
  void add(std::string_view text) {
    for (const char c : text) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
  }
  void print(Time now, const std::string& line) const {
    if (!print_) return;
    std::fprintf(stderr, "%10.6f  %s\n",
                 std::chrono::duration<double>(now.time_since_epoch()).count(), line.c_str());
  }

 private:
  bool print_;
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

class Simulation {
 public:
  Simulation(std::uint64_t seed, bool print) : random(seed), trace(print) {}

  Random random;
  Trace trace;

  Time now() const { return now_; }
  void at(Time time, std::function<void()> action) {
    events_.push({std::max(time, now_), ++sequence_, std::move(action)});
  }
  void after(Duration delay, std::function<void()> action) { at(now_ + delay, std::move(action)); }
  // Uniform in [low, high].
  Duration between(Duration low, Duration high) {
    const auto range = static_cast<std::uint64_t>((high - low).count()) + 1;
    return low + Duration(static_cast<Duration::rep>(random.below(range)));
  }
  // Runs everything up to `end`, at most `limit` events: more is a livelock.
  void run_until(Time end, std::size_t limit = 2'000'000) {
    while (!events_.empty() && events_.top().time <= end) {
      require(++events_run_ <= limit, "the run does not come to an end: too many events");
      Event event = std::move(const_cast<Event&>(events_.top()));
      events_.pop();
      now_ = event.time;
      event.action();
    }
    now_ = std::max(now_, end);
  }
  void note(const std::string& line) {
    trace.add(line);
    trace.add(static_cast<std::uint64_t>(now_.time_since_epoch().count()));
    trace.print(now_, line);
  }

 private:
  struct Event {
    Time time;
    std::uint64_t sequence;
    std::function<void()> action;

    bool operator<(const Event& other) const {  // the queue's top is the earliest
      return std::pair(time, sequence) > std::pair(other.time, other.sequence);
    }
  };

  Time now_ = Time(seconds(1000));  // no machine may take time zero for "never"
  std::uint64_t sequence_ = 0;
  std::size_t events_run_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace moolink::sim
