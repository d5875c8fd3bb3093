#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include "base/buffer.h"
#include "base/uid.h"
#include "runtime/engine/context.h"
#include "runtime/engine/future.h"

namespace moolink::runtime {

class RpcPeer;

// Borrowed buffers that this process has released, on their way to the lenders. Loans end on any
// thread, with or without the GIL or the engine's lock, and their ends do not allocate.
class LoanReturns : public std::enable_shared_from_this<LoanReturns> {
 public:
  struct Ended {
    Uid lender;
    std::uint64_t session = 0;
    std::uint64_t loan = 0;
  };

  explicit LoanReturns(std::weak_ptr<RpcPeer> peer) : peer_(std::move(peer)) {}

  // The same bytes; the loan ends with the last copy of the buffer.
  Buffer borrow(Buffer bytes, const Ended& loan);
  std::list<Ended> take();

 private:
  // The data that the end of a loan needs, made in advance.
  struct Loan;
  void end(Loan& loan) noexcept;

  const std::weak_ptr<RpcPeer> peer_;
  std::mutex mutex_;
  std::list<Ended> ended_;
};

// Completes the future, and runs the task on a worker, when the last copy of the pointer is gone:
// it travels with the buffers of the lent memory, so no reader is left then.
std::shared_ptr<const void> on_release(std::shared_ptr<Context> context,
                                       std::shared_ptr<Future> future, Task task);

}  // namespace moolink::runtime
