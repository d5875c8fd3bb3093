#include "runtime/engine/compute.h"

#include <utility>

#include "io/quiet_thread.h"

namespace moolink::runtime {

Compute::~Compute() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_one();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Compute::submit(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    if (!thread_.joinable()) thread_ = io::quiet_thread([state = state_] { run(*state); });
    state_->tasks.push_back(std::move(task));
  }
  state_->changed.notify_one();
}

void Compute::run(State& state) {
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

}  // namespace moolink::runtime
