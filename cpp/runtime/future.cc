#include "runtime/future.h"

#include <utility>

namespace moolink::runtime {

bool Future::wait(Time deadline, const Engine::Interrupt& interrupt) {
  if (done()) return true;
  Engine::Lock lock = context_->lock();
  if (done()) return true;
  Waiter waiter;
  waiters_.push_back(&waiter);
  struct Forget {  // also when interrupted by an exception; the lock is held then too
    std::vector<Waiter*>& waiters;
    Waiter* waiter;
    ~Forget() { std::erase(waiters, waiter); }
  } const forget{waiters_, &waiter};
  return context_->wait(lock, waiter, deadline, interrupt);
}

void Future::cancel() {
  const Engine::Lock lock = context_->lock();
  if (done()) return;
  if (cancel_) std::exchange(cancel_, nullptr)();
  complete(Error{ErrorCode::cancelled, "the operation was cancelled", {}, {}, {}, {}, Ran::maybe});
}

void Future::then(Task task) {
  const Engine::Lock lock = context_->lock();
  if (done()) {
    context_->workers().submit(std::move(task));
  } else {
    tasks_.push_back(std::move(task));
  }
}

void Future::complete(rpc::Reply outcome) {
  if (done()) return;
  outcome_ = std::move(outcome);
  cancel_ = nullptr;
  done_.store(true, std::memory_order_release);
  for (Waiter* waiter : waiters_) context_->engine().finish(*waiter);
  for (Task& task : tasks_) context_->workers().submit(std::move(task));
  tasks_.clear();
}

}  // namespace moolink::runtime
