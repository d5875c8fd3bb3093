#include "runtime/engine/stream.h"

#include <utility>

namespace moolink::runtime {

std::optional<wire::Payload> Stream::take() {
  const Engine::Lock lock = context().lock();
  if (items_.empty()) return std::nullopt;
  std::optional<wire::Payload> item(std::move(items_.front()));
  items_.pop_front();
  if (items_.empty() && !outcome_) set_unready();
  // Half of the credit at once: one message for several items, and no pause.
  if (!outcome_ && ++taken_ * 2 >= credit_) {
    const auto raise_credit = raise_credit_;  // complete() destroys the member
    raise_credit(std::exchange(taken_, 0));
  }
  return item;
}

bool Stream::ended() {
  const Engine::Lock lock = context().lock();
  return outcome_.has_value() && items_.empty();
}

void Stream::cancel() {
  if (context().abandoned()) return;  // in a forked child: the call is the parent's
  const Engine::Lock lock = context().lock();
  // complete() destroys the function called here.
  if (!outcome_) std::exchange(cancel_, nullptr)();
}

void Stream::add(wire::Payload item) {
  items_.push_back(std::move(item));
  if (!ready()) set_ready();
}

void Stream::complete(rpc::Reply outcome) {
  if (outcome_) return;
  outcome_ = std::move(outcome);
  raise_credit_ = nullptr;
  cancel_ = nullptr;
  set_ready();
}

}  // namespace moolink::runtime
