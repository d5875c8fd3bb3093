#pragma once

#include <utility>

#include "base/thread_safety.h"
#include "runtime/engine/awaitable.h"

namespace moolink::runtime {

// The outcome of a call or operation, readable by any number of readers once done() is true.
class Future final : public Awaitable {
 public:
  using Awaitable::Awaitable;

  bool done() const { return ready(); }
  // Only after done().
  const rpc::Reply& outcome() const { return outcome_; }

  // Asks the peer to stop; the future is done, with CancelledError, when this returns.
  void cancel() MOOLINK_UNLOCKED {
    const Engine::Lock lock = context().lock();
    if (done()) return;
    if (cancel_) std::exchange(cancel_, nullptr)();
    complete(Error{
        .code = ErrorCode::cancelled, .message = "the operation was cancelled", .ran = Ran::maybe});
  }
  // Runs the task on a worker once the future is done, or at once if it is.
  void then(Task task) MOOLINK_UNLOCKED {
    const Engine::Lock lock = context().lock();
    if (done()) {
      context().workers().submit(std::move(task));
    } else {
      tasks_.push_back(std::move(task));
      context().engine().flush();  // a thread waits
    }
  }

  void complete(rpc::Reply outcome) MOOLINK_LOCKED override {
    if (done()) return;
    outcome_ = std::move(outcome);
    cancel_ = nullptr;
    set_ready();
    context().workers().submit(std::move(tasks_));
  }

 private:
  rpc::Reply outcome_;
  Tasks tasks_ MOOLINK_GUARDED;
};

}  // namespace moolink::runtime
