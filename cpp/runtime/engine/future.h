#pragma once

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

  void complete(rpc::Reply outcome) override;

 private:
  rpc::Reply outcome_;
  Tasks tasks_;
};

}  // namespace moolink::runtime
