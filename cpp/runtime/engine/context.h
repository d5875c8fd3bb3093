#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "base/at_fork.h"
#include "base/log.h"
#include "base/thread_safety.h"
#include "base/uid.h"
#include "io/task_thread.h"
#include "memory/lending_pool.h"
#include "memory/pool.h"
#include "runtime/engine/dump_server.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/flight_recorder.h"
#include "runtime/engine/reminder.h"
#include "runtime/engine/workers.h"

namespace moolink::runtime {

struct ContextOptions {
  std::size_t workers = 0;  // most handlers at once; 0: by the number of cores
  std::shared_ptr<Interpreter> interpreter = std::make_shared<Interpreter>();
  LogSink log;   // empty: nothing is logged; called by workers
  Uid host_key;  // empty: this host's; tests use several on one
};

// An object with resources that a forked child must drop: descriptors that belong to the parent.
// Called in the child of fork(). From then on the object must never be destroyed, because the
// parent's other threads, which do not exist in the child, were using it.
class Forkable {
 public:
  virtual ~Forkable() = default;
  virtual void abandon() noexcept MOOLINK_LOCKED = 0;
};

// The threads and pools that peers share: the engine with its reactor, the workers, the memory.
class Context final : public AtFork, public std::enable_shared_from_this<Context> {
 public:
  static std::shared_ptr<Context> create(ContextOptions options);
  ~Context();
  Engine& engine() { return engine_; }
  Workers& workers() { return workers_; }
  memory::Pool& pool() { return pool_; }
  // For large memory that is used once: the pool returns freed blocks to the system at once.
  memory::Pool& transient() { return transient_; }
  memory::LendingPool& lending() { return *lending_; }
  // For arithmetic on large buffers; it needs no GIL.
  io::TaskThread& compute() { return compute_; }
  const Uid& host_key() const { return options_.host_key; }

  // Takes the engine's lock; throws Exception{closed} in a forked child, where no thread runs.
  Engine::Lock lock() MOOLINK_TAKES_LOCK;
  // Like lock(), but not held if it would have to wait, or in a forked child.
  Engine::TriedLock try_lock() MOOLINK_UNLOCKED {
    return abandoned() ? Engine::TriedLock() : engine_.try_lock();
  }
  // Waits until engine().finish(waiter); a worker's slot is lent meanwhile. Logs the reason for a
  // long wait.
  bool wait(Engine::Lock& lock, Waiter& waiter, Time deadline, const Engine::Interrupt& interrupt)
      MOOLINK_LOCKED;
  // Logs through a worker.
  void log(LogLevel level, std::string text) MOOLINK_LOCKED;

  FlightRecorder& recorder() MOOLINK_LOCKED { return recorder_; }
  // The state for people: peers, calls, handlers, groups, waiting threads, the last `events`.
  std::string describe(std::size_t events) const MOOLINK_LOCKED;

  std::string dump() MOOLINK_UNLOCKED;
  // The present waits, for people: calls, handlers, threads.
  std::string who_waits() MOOLINK_UNLOCKED;
  // The same, at most a moment old, so that many calls may time out at once.
  std::shared_ptr<const std::string> who_waited(Time now) MOOLINK_LOCKED;

  // Ends the threads. Peers must have been closed.
  void stop() MOOLINK_UNLOCKED;

  // True in a child of fork(): the whole context belongs to the parent.
  bool abandoned() const { return abandoned_.load(std::memory_order_relaxed); }
  [[nodiscard]] Listed<Forkable> add(Forkable& forkable) MOOLINK_LOCKED {
    return {forkables_, forkable};
  }

 private:
  explicit Context(ContextOptions options);
  std::string explain(const Waiter& waiter, Time now) const MOOLINK_LOCKED;
  std::string waits(Time now) const MOOLINK_LOCKED;
  void before_fork() noexcept override { engine_.before_fork(); }
  void after_fork_in_parent() noexcept override { engine_.after_fork(); }
  void after_fork_in_child() noexcept override;

  ContextOptions options_;
  Engine engine_;
  memory::Pool pool_;
  memory::Pool transient_{0};
  const std::shared_ptr<memory::LendingPool> lending_ = std::make_shared<memory::LendingPool>();
  Workers workers_;
  const Listed<Driven> workers_tick_ = engine_.add(workers_);
  io::TaskThread compute_{"moolink sums"};
  FlightRecorder recorder_ MOOLINK_GUARDED;
  Reminder reminder_ MOOLINK_GUARDED;  // of waiting threads
  DumpServer dump_server_ MOOLINK_GUARDED;
  std::thread reactor_;
  std::shared_ptr<const std::string> who_waited_ MOOLINK_GUARDED;
  Time who_waited_at_ MOOLINK_GUARDED{};
  std::vector<Forkable*> forkables_ MOOLINK_GUARDED;
  std::atomic<bool> abandoned_{false};
  bool stopped_ = false;
};

}  // namespace moolink::runtime
