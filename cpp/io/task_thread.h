#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/at_fork.h"

namespace moolink::io {

// One thread for tasks that would hold up the reactor: arithmetic on large buffers, names to look
// up. The first task starts it.
class TaskThread {
 public:
  // The destructor's effect. wait: it waits for all tasks. leave: it drops the tasks that have not
  // begun, and does not wait for a running one, which must own all that it uses; for system calls
  // without a time limit.
  enum class AtEnd { wait, leave };

  explicit TaskThread(const char* name, AtEnd at_end = AtEnd::wait)
      : name_(name), at_end_(at_end) {}
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // Runs tasks in the order of their submission, without any lock; they must not throw. Throws
  // std::system_error or std::bad_alloc, and does not run the task, if there is no thread or
  // memory.
  void submit(std::function<void()> task);
  // Those that have not begun.
  void drop_tasks();
  // In a forked child the thread does not exist: forgets it without joining.
  void abandon() noexcept;

 private:
  // Shared with the thread: its last task may drop the last reference to the owner of this object.
  struct State {
    std::mutex mutex;
    HeldOverForks over_forks{mutex};
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    bool stopping = false;
  };
  static void run(State& state);

  const char* const name_;
  const AtEnd at_end_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace moolink::io
