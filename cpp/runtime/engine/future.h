#pragma once

#include <functional>
#include <memory>

#include "base/error.h"
#include "rpc/node.h"
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
  void cancel();
  // Runs the task on a worker once the future is done, or at once if it is.
  void then(Task task);

  // --- with the engine's lock held
  // The first outcome is final.
  void complete(rpc::Reply outcome);
  // How cancel() cancels the operation; it must complete the future.
  void on_cancel(std::function<void()> cancel) { cancel_ = std::move(cancel); }

 private:
  rpc::Reply outcome_;
  Tasks tasks_;
  std::function<void()> cancel_;
};

}  // namespace moolink::runtime
