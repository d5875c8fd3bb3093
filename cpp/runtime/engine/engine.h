#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/scoped.h"
#include "base/thread_safety.h"
#include "base/time.h"
#include "io/loop.h"
#include "runtime/engine/engine_mutex.h"
#include "runtime/engine/spin_policy.h"

namespace moolink::runtime {

enum class Describe { waits, everything };

// Driven by the engine's clock: a machine with the code that carries out its actions.
class Driven {
 public:
  virtual ~Driven() = default;
  virtual void tick(Time now) MOOLINK_LOCKED = 0;
  // The latest time for the next tick(); kNever if nothing is awaited.
  virtual Time next_deadline() const MOOLINK_LOCKED = 0;
  // The end of a turn: messages written in it may be sent.
  virtual void flush() MOOLINK_LOCKED {}
  // Appends its state to a text for people, or only its waits.
  virtual void describe(Time /*now*/, Describe /*how*/, std::string& /*text*/) const
      MOOLINK_LOCKED {}
};

// A thread that waits for an event under the engine's lock.
struct Waiter {
  std::condition_variable_any changed;
  bool done MOOLINK_GUARDED = false;
  bool blocked MOOLINK_GUARDED = false;  // in `changed`; else it is polling, or about to look
  // For people: the object that the thread waits for, with its number if it has one.
  const char* what = "something";
  std::uint64_t id = 0;
  Time since MOOLINK_GUARDED{};
  int thread MOOLINK_GUARDED = 0;
  // A better text than `what`, if any: the cause of the wait, and a remedy; empty: none.
  // Called with the engine's lock held.
  std::function<std::string(Time)> explain;
};

// The one lock, the one loop, and the role of the thread that polls it.
//
// A waiting thread polls the loop itself if no other thread does: its reply then reaches it without
// waking another thread. A polling thread that has handed something to another thread steps aside,
// so that that thread may poll next time. The reactor polls whenever no other thread has for about
// a millisecond, so machines and sockets never wait for user code.
class Engine {
 public:
  // Holds the lock until its end.
  class MOOLINK_THREAD_SAFETY(scoped_lockable) Lock {
   public:
    explicit Lock(EngineMutex& mutex) MOOLINK_TAKES_LOCK : lock_(mutex) {}
    Lock(Lock&&) = default;
    ~Lock() MOOLINK_THREAD_SAFETY(release_capability()) {}
    void lock() MOOLINK_THREAD_SAFETY(acquire_capability()) { lock_.lock(); }
    void unlock() MOOLINK_THREAD_SAFETY(release_capability()) { lock_.unlock(); }

   private:
    std::unique_lock<EngineMutex> lock_;
  };
  using TriedLock = std::unique_lock<EngineMutex>;
  // Called about every 50 ms while a thread waits, without the lock; ends the wait by throwing.
  using Interrupt = std::function<void()>;

  Lock lock() MOOLINK_TAKES_LOCK { return Lock(mutex_); }
  // The analysis does not know whether this has the lock: a caller that has it calls
  // engine_lock.assume().
  TriedLock try_lock() MOOLINK_UNLOCKED { return {mutex_, std::try_to_lock}; }
  io::Loop& loop() { return loop_; }

  // Gets the errors that a tick or a flush has thrown. A driven object handles errors that concern
  // only it; the others continue.
  void on_failure(std::function<void(const Error&)> failed) { failed_ = std::move(failed); }

  [[nodiscard]] Listed<Driven> add(Driven& driven) MOOLINK_LOCKED { return {driven_, driven}; }
  // After an operation from outside the loop: the polling thread may have to wake earlier.
  void rearm(Time deadline) MOOLINK_LOCKED {
    if (role_taken_ && deadline < polling_until_) loop_.wake();
  }
  void finish(Waiter& waiter) MOOLINK_LOCKED;
  void describe(Time now, Describe how, std::string& text) const MOOLINK_LOCKED;
  // Sends everything written.
  void flush() MOOLINK_LOCKED;
  // The same, but frames in quick succession, as in a loop of calls, are sent together: when there
  // are enough, when a thread waits, or after a moment.
  void flush_bursts() MOOLINK_LOCKED;

  // Waits until finish(waiter); false if the deadline passed.
  bool wait(Lock& lock, Waiter& waiter, Time deadline, const Interrupt& interrupt) MOOLINK_LOCKED;

  // Polls if no other thread does, until `leave` returns true or something was handed over.
  void poll_while_idle(Lock& lock, const std::function<bool()>& leave) MOOLINK_LOCKED;
  // This turn's event is for another thread, which is awake now.
  void handed_over() MOOLINK_LOCKED { handed_over_ = true; }
  bool role_free() const MOOLINK_LOCKED { return !role_taken_; }

  // The reactor thread's main function, until stop_reactor().
  void run_reactor() MOOLINK_UNLOCKED;
  void stop_reactor();

  // The number of this thread, as the system's tools show it.
  static int this_thread();
  static void forget_this_thread();  // in a forked child, which has another one

  // The prepare, parent and child sides of fork().
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  void abandon() noexcept { loop_.abandon(); }

 private:
  // The polling role, for a scope.
  struct Role {
    Engine& engine;
    explicit Role(Engine& taken_of) MOOLINK_LOCKED;
    ~Role() MOOLINK_LOCKED;
  };
  bool turn(Lock& lock, Time until) MOOLINK_LOCKED;
  bool look_again(Lock& lock, Time begin, bool long_turn) MOOLINK_LOCKED;
  Time next_deadline() const MOOLINK_LOCKED;
  bool tick(Time now) MOOLINK_LOCKED;
  void stand_by(Lock& lock) MOOLINK_LOCKED;
  void nap_while_others_poll() MOOLINK_UNLOCKED;

  EngineMutex mutex_;
  io::Loop loop_;
  std::vector<Driven*> driven_ MOOLINK_GUARDED;
  std::function<void(const Error&)> failed_;
  std::vector<Waiter*> waiters_ MOOLINK_GUARDED;
  Time written_at_ MOOLINK_GUARDED{};       // flush_bursts() was called last
  Time leave_at_ MOOLINK_GUARDED = kNever;  // when put-off writes must leave
  Time ticks_at_ MOOLINK_GUARDED{};         // after a failed tick: none before this time
  std::size_t put_off_ MOOLINK_GUARDED = 0;
  bool role_taken_ MOOLINK_GUARDED = false;
  bool handed_over_ MOOLINK_GUARDED = false;
  SpinPolicy spin_policy_ MOOLINK_GUARDED;
  bool gave_way_ MOOLINK_GUARDED = false;        // since the last turn
  Time polling_until_ MOOLINK_GUARDED = kNever;  // while a thread is in a turn
  std::condition_variable_any reactor_;
  bool reactor_parked_ MOOLINK_GUARDED = false;  // it waits until the role is free
  // State that the reactor reads without the lock.
  std::atomic<std::uint64_t> turns_taken_{0};  // times the role was taken
  std::atomic<bool> stopping_{false};
  std::mutex napping_;  // of nap_ends_
  std::condition_variable nap_ends_;
};

}  // namespace moolink::runtime
