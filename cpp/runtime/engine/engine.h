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
#include "base/time.h"
#include "io/loop.h"
#include "runtime/engine/engine_mutex.h"
#include "runtime/engine/spin_policy.h"

namespace moolink::runtime {

enum class Describe { waits, everything };

// Driven by the engine's clock: a machine with the code that carries out its actions. Called with
// the engine's lock held.
class Driven {
 public:
  virtual ~Driven() = default;
  virtual void tick(Time now) = 0;
  // The latest time for the next tick(); kNever if nothing is awaited.
  virtual Time next_deadline() const = 0;
  // The end of a turn: messages written in it may be sent.
  virtual void flush() {}
  // Appends its state to a text for people, or only its waits.
  virtual void describe(Time /*now*/, Describe /*how*/, std::string& /*text*/) const {}
};

// A thread that waits for an event under the engine's lock.
struct Waiter {
  std::condition_variable_any changed;
  bool done = false;
  bool blocked = false;  // in `changed`; else it is polling, or about to look
  // For people: the object that the thread waits for, with its number if it has one.
  const char* what = "something";
  std::uint64_t id = 0;
  Time since{};
  int thread = 0;
  // A better text than `what`, if any: the cause of the wait, and a remedy; empty: none.
  // Called with the lock held.
  std::function<std::string(Time)> explain;
};

// The one lock, the one loop, and the role of the thread that polls it.
//
// A waiting thread polls the loop itself if no other thread does: its reply then reaches it without
// waking another thread. A poller that has handed something to another thread steps aside, so that
// that thread may poll next time. The reactor polls whenever no other thread has for about a
// millisecond, so machines and sockets never wait for user code.
class Engine {
 public:
  using Lock = std::unique_lock<EngineMutex>;
  // Called about every 50 ms while a thread waits, without the lock; ends the wait by throwing.
  using Interrupt = std::function<void()>;

  Lock lock() { return Lock(mutex_); }
  Lock try_lock() { return Lock(mutex_, std::try_to_lock); }
  io::Loop& loop() { return loop_; }

  // Gets the errors that a tick or a flush has thrown. A driven object handles errors that concern
  // only it; the others continue.
  void on_failure(std::function<void(const Error&)> failed) { failed_ = std::move(failed); }

  // --- with the lock held
  [[nodiscard]] Listed<Driven> add(Driven& driven) { return {driven_, driven}; }
  // After an operation from outside the loop: the polling thread may have to wake earlier.
  void rearm(Time deadline) {
    if (role_taken_ && deadline < polling_until_) loop_.wake();
  }
  void finish(Waiter& waiter);
  void describe(Time now, Describe how, std::string& text) const;
  // Sends everything written.
  void flush();
  // The same, but frames in quick succession, as in a loop of calls, are sent together: when there
  // are enough, when a thread waits, or after a moment.
  void flush_bursts();

  // Waits until finish(waiter); false if the deadline passed.
  bool wait(Lock& lock, Waiter& waiter, Time deadline, const Interrupt& interrupt);

  // Polls if no other thread does, until `leave` returns true or something was handed over.
  void poll_while_idle(Lock& lock, const std::function<bool()>& leave);
  // This turn's event is for another thread, which is awake now.
  void handed_over() { handed_over_ = true; }
  bool role_free() const { return !role_taken_; }

  // The reactor thread's main function, until stop_reactor().
  void run_reactor();
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
  Time leave_at_ = kNever;  // when put-off writes must leave
  Time ticks_at_{};         // after a failed tick: none before this time
  std::size_t put_off_ = 0;
  bool role_taken_ = false;
  bool handed_over_ = false;
  SpinPolicy spin_policy_;
  bool gave_way_ = false;        // since the last turn
  Time polling_until_ = kNever;  // while a thread is in a turn
  std::condition_variable_any reactor_;
  bool reactor_parked_ = false;  // it waits until the role is free
  // State that the reactor reads without the lock.
  std::atomic<std::uint64_t> turns_taken_{0};  // times the role was taken
  std::atomic<bool> stopping_{false};
  std::mutex napping_;  // of nap_ends_
  std::condition_variable nap_ends_;
};

}  // namespace moolink::runtime
