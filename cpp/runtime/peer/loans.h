#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "base/buffer.h"
#include "base/uid.h"
#include "runtime/engine/context.h"
#include "runtime/engine/future.h"

namespace moolink::runtime {

// Borrowed buffers that this process has released, on their way to the lenders. Loans end on any
// thread, with or without the GIL or the engine's lock, and their ends do not allocate.
class LoanReturns : public std::enable_shared_from_this<LoanReturns> {
 public:
  struct Ended {
    Uid lender;
    std::uint64_t session = 0;
    std::uint64_t loan = 0;
  };

  // The loop calls `returned` when loans have ended: take() then returns them.
  LoanReturns(std::shared_ptr<Context> context, std::function<void()> returned)
      : context_(std::move(context)), returned_(std::move(returned)) {}

  // The same bytes; the loan ends with the last copy of the buffer.
  Buffer borrow(Buffer bytes, const Ended& loan);
  std::list<Ended> take();

 private:
  // The data that the end of a loan needs, made in advance.
  struct Loan;
  void end(Loan& loan) noexcept;

  const std::shared_ptr<Context> context_;
  const std::function<void()> returned_;
  std::mutex mutex_;
  std::list<Ended> ended_;
};

// Completes the future, and runs the task on a worker, when the last copy of the pointer is gone:
// it travels with the buffers of the lent memory, so no reader is left then.
std::shared_ptr<const void> on_release(std::shared_ptr<Context> context,
                                       std::shared_ptr<Future> future, Task task);

}  // namespace moolink::runtime
