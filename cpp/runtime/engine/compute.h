#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace moolink::runtime {

// One thread for arithmetic on large buffers, so that the reactor stays responsive. It needs no
// GIL. The first task starts it.
class Compute {
 public:
  Compute() = default;
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  // Runs tasks in the order of their submission, without any lock; they must not throw. Throws
  // std::system_error or std::bad_alloc, and does not run the task, if there is no thread or
  // memory.
  void submit(std::function<void()> task);

 private:
  // Shared with the thread: its last task may drop the last reference to the owner of this object.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> tasks;
    bool stopping = false;
  };
  static void run(State& state);

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace moolink::runtime
