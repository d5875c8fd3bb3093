#include "runtime/engine/future.h"

#include <utility>

namespace moolink::runtime {

void Future::cancel() {
  const Engine::Lock lock = context().lock();
  if (done()) return;
  if (cancel_) std::exchange(cancel_, nullptr)();
  complete(Error{
      .code = ErrorCode::cancelled, .message = "the operation was cancelled", .ran = Ran::maybe});
}

void Future::then(Task task) {
  const Engine::Lock lock = context().lock();
  if (done()) {
    context().workers().submit(std::move(task));
  } else {
    tasks_.push_back(std::move(task));
    context().engine().flush();  // a thread waits
  }
}

void Future::complete(rpc::Reply outcome) {
  if (done()) return;
  outcome_ = std::move(outcome);
  cancel_ = nullptr;
  set_ready();
  context().workers().submit(std::move(tasks_));
}

}  // namespace moolink::runtime
