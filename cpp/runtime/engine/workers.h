#pragma once

#include <signal.h>

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>

#include "runtime/engine/engine.h"

namespace moolink::runtime {

// The runtime's interface to the language whose handlers it runs; bind implements it with the GIL.
// The reactor never calls it.
class Interpreter {
 public:
  virtual ~Interpreter() = default;
  // On a worker's thread, around a batch of tasks.
  virtual void enter() = 0;
  virtual void leave() = 0;
  // The thread, which has entered before, ends.
  virtual void thread_ends() = 0;
  // Between enter and leave: a task threw an exception.
  virtual void failed(const char* what) = 0;
};

// For handlers in C++, which need nothing.
class NoInterpreter final : public Interpreter {
 public:
  void enter() override {}
  void leave() override {}
  void thread_ends() override {}
  void failed(const char*) override {}
};

using Task = std::function<void()>;
// Tasks to run later are kept in a list, so that submitting them takes no memory and cannot fail.
using Tasks = std::list<Task>;

// The threads that run handlers and callbacks: user code, inside Interpreter::enter and leave.
//
// Tasks start in the order of their submission: a worker takes one only after it has entered the
// interpreter. One worker takes all it can; if the first task in the queue has waited for a
// millisecond, another worker is woken or started, up to the limit. A worker that waits inside
// moolink does not count, so blocking calls inside handlers cannot exhaust the pool.
class Workers final : public Driven {
 public:
  Workers(Engine& engine, Interpreter& interpreter, std::size_t limit);

  // --- with the engine's lock held
  void submit(Task task);
  void submit(Tasks&& tasks) noexcept;
  std::size_t threads() const { return threads_; }
  void set_limit(std::size_t limit) { limit_ = limit; }
  void tick(Time now) override;
  Time next_deadline() const override { return help_at_; }
  void describe(Time now, Describe how, std::string& text) const override;

  // While a worker waits inside moolink; no effect on other threads.
  class Lend {
   public:
    explicit Lend(Workers& workers);
    ~Lend();
    Lend(const Lend&) = delete;
    Lend& operator=(const Lend&) = delete;

   private:
    Workers* workers_;  // nullptr: not on a worker's thread
  };

  // --- without the lock
  // Starts the first thread, at the beginning, so that one thread runs handlers and writes the log
  // even if the process lacks resources later. Throws std::system_error.
  void start();
  // Called when the system provides no further thread although tasks wait.
  void on_failure(std::function<void(const Error&)> failed) { failed_ = std::move(failed); }
  // Ends the threads; tasks not yet begun are dropped. False if some are still in user code at the
  // deadline: they keep running, keep `owner` alive, and end when that code returns.
  bool stop(Time deadline);
  // Threads keep the owner of the workers alive.
  void set_owner(std::weak_ptr<void> owner) { owner_ = std::move(owner); }
  static bool on_worker_thread();
  // For this thread: one of its tasks has forked, and this is the child.
  static bool in_forked_child();

  // In a forked child.
  void abandon() noexcept { forked_ = true; }

 private:
  void run();
  void run_queued();
  bool take(Tasks& task);
  void call_in_another();
  void start_thread();
  void no_thread(const Error& error);

  Engine& engine_;
  Interpreter& interpreter_;
  std::size_t limit_;
  sigset_t signals_{};  // the mask of the thread that made the context
  std::weak_ptr<void> owner_;
  Tasks queue_;
  Tasks spare_;  // empty; the next tasks take their places
  std::condition_variable_any work_;
  std::condition_variable_any ended_;
  std::size_t threads_ = 0;
  std::size_t idle_ = 0;  // waiting on work_
  std::size_t lent_ = 0;
  bool polling_ = false;  // an idle worker polls the loop
  Time help_at_ = kNever;
  bool stopping_ = false;
  std::function<void(const Error&)> failed_;
  bool lacks_threads_ = false;  // and that was reported
  bool forked_ = false;
};

}  // namespace moolink::runtime
