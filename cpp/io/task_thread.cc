#include "io/task_thread.h"

#include <new>
#include <utility>

#include "io/quiet_thread.h"

namespace moolink::io {

TaskThread::~TaskThread() {
  if (at_end_ == AtEnd::leave) drop_tasks();
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_one();
  if (!thread_.joinable()) return;
  if (at_end_ == AtEnd::leave || thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void TaskThread::submit(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    if (!thread_.joinable()) thread_ = quiet_thread(name_, [state = state_] { run(*state); });
    state_->tasks.push_back(std::move(task));
  }
  state_->changed.notify_one();
}

void TaskThread::drop_tasks() {
  // One at a time, each destroyed without the lock: a second container would allocate, and the
  // destructor may not.
  while (true) {
    std::function<void()> dropped;
    const std::lock_guard lock(state_->mutex);
    if (state_->tasks.empty()) return;
    dropped = std::move(state_->tasks.front());
    state_->tasks.pop_front();
  }
}

void TaskThread::abandon() noexcept { new (&thread_) std::thread(); }

void TaskThread::run(State& state) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&state] { return state.stopping || !state.tasks.empty(); });
    if (state.tasks.empty()) return;
    std::function<void()> task = std::move(state.tasks.front());
    state.tasks.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace moolink::io
