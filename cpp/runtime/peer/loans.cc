#include "runtime/peer/loans.h"

#include <utility>

#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {

Buffer LoanReturns::borrow(Buffer bytes, const Ended& loan) {
  const std::byte* data = bytes.data();
  const std::size_t size = bytes.size();
  auto end = [bytes = std::move(bytes), returns = shared_from_this(), loan](const void*) mutable {
    const Buffer unmapped = std::move(bytes);  // weak references keep the deleter, not the bytes
    returns->end(loan);
  };
  return {std::shared_ptr<const void>(data, std::move(end)), data, size};
}

void LoanReturns::end(const Ended& loan) {
  const auto peer = peer_.lock();
  // A forked child has no part in its parent's loans, and no thread owns its locks.
  if (peer == nullptr || peer->context()->abandoned() || peer->closed()) return;
  {
    const std::lock_guard guard(mutex_);
    ended_.push_back(loan);
    if (ended_.size() > 1) return;  // those that end before the loop looks are sent together
  }
  peer->context()->engine().loop().post([peer]() MOOLINK_LOCKED { peer->return_loans(); });
}

std::vector<LoanReturns::Ended> LoanReturns::take() {
  const std::lock_guard guard(mutex_);
  return std::exchange(ended_, {});
}

namespace {

// Not a deleter: shared_ptr also calls that if it has no memory, and the caller gets an exception.
class Release {
 public:
  Release(std::shared_ptr<Context> context, std::shared_ptr<Future> future, Task task)
      : context_(std::move(context)), future_(std::move(future)), task_(std::move(task)) {}
  Release(const Release&) = delete;
  Release& operator=(const Release&) = delete;

  ~Release() {
    if (context_->abandoned()) return;
    // Through the loop: the engine's lock may be held here, or not.
    io::Loop& loop = context_->engine().loop();
    loop.post([context = std::move(context_), future = std::move(future_),
               task = std::move(task_)]() MOOLINK_LOCKED mutable {
      if (future != nullptr) future->complete(wire::Payload{});
      if (task) context->workers().submit(std::move(task));
    });
  }

 private:
  std::shared_ptr<Context> context_;
  std::shared_ptr<Future> future_;
  Task task_;
};

}  // namespace

std::shared_ptr<const void> on_release(std::shared_ptr<Context> context,
                                       std::shared_ptr<Future> future, Task task) {
  return std::make_shared<Release>(std::move(context), std::move(future), std::move(task));
}

}  // namespace moolink::runtime
