#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "rpc/node.h"
#include "runtime/context.h"

namespace moolink::runtime {

// The outcome of a call or operation, there for any number of readers once done() is true.
class Future {
 public:
  explicit Future(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Only after done().
  const rpc::Reply& outcome() const { return outcome_; }

  // Waits, polling the loop if nobody else does; false if the deadline passed. Throws what
  // `interrupt` throws.
  bool wait(Time deadline, const Engine::Interrupt& interrupt);
  // Asks the peer to stop; the future is done, with CancelledError, when this returns.
  void cancel();
  // Runs the task on a worker once the future is done, or at once if it is.
  void then(Task task);

  // --- with the engine's lock held
  // The first outcome stands.
  void complete(rpc::Reply outcome);
  // What cancel() does to the operation; it must complete the future.
  void on_cancel(std::function<void()> cancel) { cancel_ = std::move(cancel); }

 private:
  std::shared_ptr<Context> context_;
  std::atomic<bool> done_{false};
  rpc::Reply outcome_;
  std::vector<Waiter*> waiters_;
  std::vector<Task> tasks_;
  std::function<void()> cancel_;
};

}  // namespace moolink::runtime
