#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "base/at_fork.h"
#include "base/log.h"
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
  std::size_t workers = 0;                   // most handlers at once; 0: by the number of cores
  std::shared_ptr<Interpreter> interpreter;  // nullptr: handlers are C++
  LogSink log;                               // empty: nothing is logged; called by workers
  Uid host_key;                              // empty: this host's; tests use several on one
};

// An object with resources that a forked child must drop: descriptors that belong to the parent.
// Called in the child of fork(), with the engine's lock held; the object must then live for ever,
// because the parent's other threads, which do not exist in the child, were using it.
class Forkable {
 public:
  virtual ~Forkable() = default;
  virtual void abandon() noexcept = 0;
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
  Engine::Lock lock();
  // Like lock(), but not held if it would have to wait, or in a forked child.
  Engine::Lock try_lock() { return abandoned() ? Engine::Lock() : engine_.try_lock(); }
  // Waits until engine().finish(waiter); a worker's slot is lent meanwhile. Logs the reason for a
  // long wait.
  bool wait(Engine::Lock& lock, Waiter& waiter, Time deadline, const Engine::Interrupt& interrupt);
  // Logs through a worker. With the engine's lock held.
  void log(LogLevel level, std::string text);

  // --- with the engine's lock held
  FlightRecorder& recorder() { return recorder_; }
  // The state for people: peers, calls, handlers, groups, waiting threads, the last `events`.
  std::string describe(std::size_t events) const;

  // --- without the lock
  std::string dump();
  // The present waits, for people: calls, handlers, threads.
  std::string who_waits();
  // The same, at most a moment old, so that many calls may time out at once. With the lock held.
  std::shared_ptr<const std::string> who_waited(Time now);

  // Ends the threads. Peers must have been closed.
  void stop();

  // True in a child of fork(): the whole context belongs to the parent.
  bool abandoned() const { return abandoned_.load(std::memory_order_relaxed); }
  // With the engine's lock held.
  void add(Forkable& forkable) { forkables_.push_back(&forkable); }
  void remove(Forkable& forkable) { std::erase(forkables_, &forkable); }

 private:
  explicit Context(ContextOptions options);
  std::string explain(const Waiter& waiter, Time now) const;
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
  FlightRecorder recorder_;
  Reminder reminder_;  // of waiting threads
  DumpServer dump_server_;
  std::thread reactor_;
  std::shared_ptr<const std::string> who_waited_;
  Time who_waited_at_{};
  std::vector<Forkable*> forkables_;
  std::atomic<bool> abandoned_{false};
  bool stopped_ = false;
};

}  // namespace moolink::runtime
