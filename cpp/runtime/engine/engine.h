#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "io/loop.h"
#include "runtime/engine/driven.h"
#include "runtime/engine/engine_mutex.h"
#include "runtime/engine/patience.h"

namespace moolink::runtime {

// A thread that waits for something that happens under the engine's lock.
struct Waiter {
  std::condition_variable_any changed;
  bool done = false;
  bool blocked = false;  // in `changed`; else it is polling, or about to look
  // For people: what the thread waits for, with its number if it has one.
  const char* what = "something";
  std::uint64_t id = 0;
  Time since{};
  int thread = 0;
  // Where something better can be said than `what`: what is waited for, and what to do; empty:
  // nothing. Called with the lock held.
  std::function<std::string(Time)> explain;
};

// The one lock, the one loop, and the question who polls it.
//
// A thread that waits polls the loop itself if nobody does: the reply it waits for then reaches it
// without waking another thread. Whoever has polled and handed what came to another thread steps
// aside, so that the other one may poll next time. The reactor polls whenever nobody else has for
// about a millisecond, so machines and sockets never wait for user code.
class Engine {
 public:
  using Lock = std::unique_lock<EngineMutex>;
  // Called about every 50 ms while a thread waits, without the lock; ends the wait by throwing.
  using Interrupt = std::function<void()>;

  Lock lock() { return Lock(mutex_); }
  Lock try_lock() { return Lock(mutex_, std::try_to_lock); }
  io::Loop& loop() { return loop_; }

  // Hears of what a tick or a flush has thrown: those that can end what they belong to do so
  // themselves. The others go on.
  void on_failure(std::function<void(const Error&)> failed) { failed_ = std::move(failed); }

  // --- with the lock held
  void add(Driven& driven) { driven_.push_back(&driven); }
  void remove(Driven& driven);
  // After an operation from outside of the loop: whoever polls may have to get up earlier.
  void rearm(Time deadline);
  void finish(Waiter& waiter);
  void describe(Time now, Describe how, std::string& text) const;
  // All that was written leaves.
  void flush();
  // The same, but frames that come right after one another, as in a loop of calls, leave together:
  // when there are enough, when a thread waits, or in a moment.
  void flush_bursts();

  // Waits until finish(waiter); false if the deadline passed.
  bool wait(Lock& lock, Waiter& waiter, Time deadline, const Interrupt& interrupt);

  // Polls if nobody else does, until `leave` says so or what came was handed to another thread.
  void poll_while_idle(Lock& lock, const std::function<bool()>& leave);
  // What came in this turn is for another thread, which is awake now.
  void handed_over() { handed_over_ = true; }
  bool role_free() const { return !role_taken_; }

  // The reactor thread's life, until stop_reactor().
  void run_reactor();
  void stop_reactor();

  // The number of this thread, as the system's tools show it.
  static int this_thread();
  static void forget_this_thread();  // in a forked child, where it has another one

  // The prepare, parent and child sides of fork().
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  void abandon() noexcept { loop_.abandon(); }

 private:
  // The role of the one that polls, for the time of a scope.
  struct Role {
    Engine& engine;
    explicit Role(Engine& taken_of) : engine(taken_of) { engine.take_role(); }
    ~Role() { engine.release_role(); }
  };
  void take_role();
  void release_role();
  bool turn(Lock& lock, Time until);
  bool look_again(Lock& lock, Time begin, bool long_turn);
  Time next_deadline() const;
  bool tick(Time now);
  void stand_by(Lock& lock);
  void nap_while_others_poll();

  EngineMutex mutex_;
  io::Loop loop_;
  std::vector<Driven*> driven_;
  std::function<void(const Error&)> failed_;
  std::vector<Waiter*> waiters_;  // blocked ones, in order
  std::vector<const Waiter*> all_waiters_;
  Time written_at_{};       // flush_bursts() was called last
  Time leave_at_ = kNever;  // what was put off
  Time ticks_at_{};         // a tick has failed: none before
  std::size_t put_off_ = 0;
  bool role_taken_ = false;
  bool handed_over_ = false;
  Patience patience_;
  bool gave_way_ = false;        // since the last turn
  Time polling_until_ = kNever;  // while somebody is in a turn
  std::condition_variable_any reactor_;
  bool reactor_parked_ = false;  // it waits to be told that the role is free
  // What the reactor looks at without the lock.
  std::atomic<std::uint64_t> stints_{0};  // times that the role was taken
  std::atomic<bool> stopping_{false};
  std::mutex napping_;  // of nap_ends_
  std::condition_variable nap_ends_;
};

}  // namespace moolink::runtime
