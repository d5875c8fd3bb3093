#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "base/thread_safety.h"
#include "runtime/engine/awaitable.h"

namespace moolink::runtime {

// The items of a streamed call at its caller, and its outcome. Ready while take() has an item or
// the end to report. Taken items make room for more.
class Stream final : public Awaitable {
 public:
  Stream(std::shared_ptr<Context> context, std::uint64_t credit)
      : Awaitable(std::move(context)), credit_(credit) {}

  // The next item. None: it has not arrived yet if ended() is false, else there will be none.
  std::optional<wire::Payload> take() MOOLINK_UNLOCKED {
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
  // All items have been taken, and the handler has replied or the call has failed.
  bool ended() MOOLINK_UNLOCKED {
    const Engine::Lock lock = context().lock();
    return outcome_.has_value() && items_.empty();
  }
  // Only after ended(), because it does not change after that.
  const rpc::Reply& outcome() const MOOLINK_UNCHECKED { return *outcome_; }
  // Tells the handler to stop. Items that have arrived can still be taken.
  void cancel() MOOLINK_UNLOCKED {
    if (context().abandoned()) return;  // in a forked child: the call is the parent's
    const Engine::Lock lock = context().lock();
    // complete() destroys the function called here.
    if (!outcome_) std::exchange(cancel_, nullptr)();
  }

  // How to tell the handler that so many more items may come.
  void on_room(std::function<void(std::uint64_t)> raise_credit) MOOLINK_LOCKED {
    raise_credit_ = std::move(raise_credit);
  }
  void add(wire::Payload item) MOOLINK_LOCKED {
    items_.push_back(std::move(item));
    if (!ready()) set_ready();
  }
  void complete(rpc::Reply outcome) MOOLINK_LOCKED override {
    if (outcome_) return;
    outcome_ = std::move(outcome);
    raise_credit_ = nullptr;
    cancel_ = nullptr;
    set_ready();
  }

 private:
  const std::uint64_t credit_;
  std::function<void(std::uint64_t)> raise_credit_ MOOLINK_GUARDED;
  std::deque<wire::Payload> items_ MOOLINK_GUARDED;
  std::uint64_t taken_ MOOLINK_GUARDED = 0;  // since credit was raised
  std::optional<rpc::Reply> outcome_ MOOLINK_GUARDED;
};

}  // namespace moolink::runtime
