#include "runtime/peer/loans.h"

#include <utility>

namespace moolink::runtime {

struct LoanReturns::Loan {
  Loan(Buffer of, std::shared_ptr<LoanReturns> to, const Ended& loan)
      : bytes(std::move(of)),
        returns(std::move(to)),
        ended{loan},
        returned(io::Loop::prepare(returns->returned_)) {}
  ~Loan() {
    bytes = {};  // unmapped first
    returns->end(*this);
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  Buffer bytes;
  std::shared_ptr<LoanReturns> returns;
  std::list<Ended> ended;
  io::Loop::Prepared returned;
};

Buffer LoanReturns::borrow(Buffer bytes, const Ended& loan) {
  const std::byte* data = bytes.data();
  const std::size_t size = bytes.size();
  const auto held = std::make_shared<Loan>(std::move(bytes), shared_from_this(), loan);
  return {std::shared_ptr<const void>(held, data), data, size};
}

void LoanReturns::end(Loan& loan) noexcept {
  // A forked child has no part in its parent's loans, and no thread owns its locks.
  if (context_->abandoned()) return;
  {
    const std::lock_guard guard(mutex_);
    ended_.splice(ended_.end(), loan.ended);
    if (ended_.size() > 1) return;  // those that end before the loop looks are sent together
  }
  context_->engine().loop().post(std::move(loan.returned));
}

std::list<LoanReturns::Ended> LoanReturns::take() {
  const std::lock_guard guard(mutex_);
  return std::exchange(ended_, {});
}

namespace {

class Release {
 public:
  Release(std::shared_ptr<Context> context, std::shared_ptr<Future> future, Task task)
      : context_(std::move(context)),
        release_(io::Loop::prepare([context = context_, future = std::move(future),
                                    task = std::move(task)]() MOOLINK_LOCKED mutable {
          if (future != nullptr) future->complete(wire::Payload{});
          if (task) context->workers().submit(std::move(task));
        })) {}
  Release(const Release&) = delete;
  Release& operator=(const Release&) = delete;

  ~Release() {
    // Through the loop: the engine's lock may be held here, or not.
    if (!context_->abandoned()) context_->engine().loop().post(std::move(release_));
  }

 private:
  std::shared_ptr<Context> context_;
  io::Loop::Prepared release_;
};

}  // namespace

std::shared_ptr<const void> on_release(std::shared_ptr<Context> context,
                                       std::shared_ptr<Future> future, Task task) {
  return std::make_shared<Release>(std::move(context), std::move(future), std::move(task));
}

}  // namespace moolink::runtime
