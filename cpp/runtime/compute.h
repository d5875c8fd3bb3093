#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace moolink::runtime {

// One thread for arithmetic on large buffers, so that the reactor keeps its pace and needs no GIL.
// Started by the first task.
class Compute {
 public:
  Compute() = default;
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  // Tasks run in the order of their submission, without any lock; they must not throw.
  void submit(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace moolink::runtime
