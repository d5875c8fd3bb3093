#pragma once

#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "base/thread_safety.h"
#include "runtime/engine/engine.h"

namespace moolink::runtime {

// The runtime's interface to the language whose handlers it runs; bind implements it with the GIL.
// The reactor never calls it. The base class is for handlers in C++, which need nothing.
class Interpreter {
 public:
  virtual ~Interpreter() = default;
  // On a worker's thread, around a batch of tasks.
  virtual void enter() {}
  virtual void leave() {}
  // The thread, which has entered before, ends.
  virtual void thread_ends() {}
  // Between enter and leave: a task threw an exception.
  virtual void failed(const char* /*what*/) {}
};

using Task = std::function<void()>;
// Tasks to run later are kept in a list, so that submitting them takes no memory and cannot fail.
using Tasks = std::list<Task>;

// The threads that run handlers and callbacks: user code, inside Interpreter::enter and leave.
//
// Tasks start in the order of their submission: a worker takes one only after it has entered the
// interpreter. One worker takes all it can; if the first task in the queue has waited for a
// millisecond, another worker is woken or started, up to the limit. A worker that waits inside
// moolink does not count: its wait begins only if another worker remains or can be started, so
// blocking calls inside handlers cannot exhaust the pool. Threads beyond the limit that stay idle
// for some seconds end.
class Workers final : public Driven {
 public:
  Workers(Engine& engine, Interpreter& interpreter, std::size_t limit);

  void submit(Task task) MOOLINK_LOCKED;
  void submit(Tasks&& tasks) noexcept MOOLINK_LOCKED;
  std::size_t threads() const MOOLINK_LOCKED { return threads_; }
  void set_limit(std::size_t limit) MOOLINK_LOCKED { limit_ = limit; }
  void tick(Time now) MOOLINK_LOCKED override;
  Time next_deadline() const MOOLINK_LOCKED override {
    return std::min({help_at_, trim_at_, resume_at_});
  }
  void describe(Time now, Describe how, std::string& text) const MOOLINK_LOCKED override;

  // Exists while a worker waits inside moolink; no effect on other threads, nor inside another
  // Lend. Throws Exception{error} if no worker would remain that serves, or too many wait.
  class Lend {
   public:
    explicit Lend(Workers& workers) MOOLINK_LOCKED;
    ~Lend() MOOLINK_LOCKED;
    // The wait is over. Returns when this worker may go on: at once if fewer than the limit run.
    void end(Engine::Lock& lock) MOOLINK_LOCKED;
    Lend(const Lend&) = delete;
    Lend& operator=(const Lend&) = delete;

   private:
    Workers* workers_ = nullptr;  // null: this has no effect
  };

  // Starts the first thread, at the beginning, so that one thread runs handlers and writes the log
  // even if the process lacks resources later. Throws std::system_error.
  void start() MOOLINK_UNLOCKED;
  // Called when the system provides no further thread although tasks wait.
  void on_failure(std::function<void(const Error&)> failed) { failed_ = std::move(failed); }
  // Ends the threads; tasks not yet begun are dropped. False if some are still in user code at the
  // deadline: they keep running, keep `owner` alive, and end when that code returns.
  bool stop(Time deadline) MOOLINK_UNLOCKED;
  // Threads keep the owner of the workers alive.
  void set_owner(std::weak_ptr<void> owner) { owner_ = std::move(owner); }
  static bool on_worker_thread();
  // For this thread: one of its tasks has forked, and this is the child.
  static bool in_forked_child();

  // In a forked child.
  void abandon() noexcept { forked_ = true; }

 private:
  void run() MOOLINK_UNLOCKED;
  void run_queued() MOOLINK_UNLOCKED;
  Tasks take() MOOLINK_UNLOCKED;  // one, or none
  void help_after(Duration duration) MOOLINK_LOCKED;
  void call_in_another() MOOLINK_LOCKED;
  void start_thread() MOOLINK_LOCKED;
  void trim(Time now) MOOLINK_LOCKED;
  void begin_wait() MOOLINK_LOCKED;
  void end_wait(Engine::Lock& lock) MOOLINK_LOCKED;
  bool resume_one() MOOLINK_LOCKED;
  std::size_t running() const MOOLINK_LOCKED {
    return threads_ - lent_ - idle_ - (polling_ ? 1 : 0);
  }
  [[noreturn]] void refuse_wait(const std::string& why) MOOLINK_LOCKED;
  void no_thread(const Error& error) MOOLINK_LOCKED;

  // A worker whose wait has ended, until it may go on. It still counts as lent.
  struct Resuming {
    std::condition_variable_any changed;
    bool goes_on = false;
  };

  Engine& engine_;
  Interpreter& interpreter_;
  std::size_t limit_ MOOLINK_GUARDED;
  sigset_t signals_{};  // the mask of the thread that made the context
  std::weak_ptr<void> owner_;
  Tasks queue_ MOOLINK_GUARDED;
  std::condition_variable_any work_;
  std::condition_variable_any ended_;
  std::size_t threads_ MOOLINK_GUARDED = 0;
  std::size_t idle_ MOOLINK_GUARDED = 0;  // waiting on work_
  std::size_t lent_ MOOLINK_GUARDED = 0;
  std::deque<Resuming*> resuming_ MOOLINK_GUARDED;
  Time resume_at_ MOOLINK_GUARDED = kNever;
  std::size_t idle_low_ MOOLINK_GUARDED = 0;  // lowest idle_ since the last trim()
  std::size_t surplus_ MOOLINK_GUARDED = 0;   // idle threads that are to end
  Time trim_at_ MOOLINK_GUARDED = kNever;
  bool polling_ MOOLINK_GUARDED = false;  // an idle worker polls the loop
  Time help_at_ MOOLINK_GUARDED = kNever;
  bool stopping_ MOOLINK_GUARDED = false;
  std::function<void(const Error&)> failed_;
  bool lacks_threads_ MOOLINK_GUARDED = false;  // and that was reported
  Time say_again_at_ MOOLINK_GUARDED{};         // from then on, a refused wait is reported
  bool forked_ = false;
};

}  // namespace moolink::runtime
