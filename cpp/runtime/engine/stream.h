#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "runtime/engine/awaitable.h"

namespace moolink::runtime {

// The items of a streamed call at its caller, and its outcome. Ready while take() has an item or
// the end to report. Taken items make room for more.
class Stream final : public Awaitable {
 public:
  Stream(std::shared_ptr<Context> context, std::uint64_t credit)
      : Awaitable(std::move(context)), credit_(credit) {}

  // The next item. None: it has not arrived yet if ended() is false, else there will be none.
  std::optional<wire::Payload> take();
  // All items have been taken, and the handler has replied or the call has failed.
  bool ended();
  // Only after ended().
  const rpc::Reply& outcome() const { return *outcome_; }
  // Tells the handler to stop. Items that have arrived can still be taken.
  void cancel();

  // --- with the engine's lock held
  // How to tell the handler that so many more items may come.
  void on_room(std::function<void(std::uint64_t)> raise_credit) {
    raise_credit_ = std::move(raise_credit);
  }
  void add(wire::Payload item);
  void complete(rpc::Reply outcome) override;

 private:
  const std::uint64_t credit_;
  std::function<void(std::uint64_t)> raise_credit_;
  std::deque<wire::Payload> items_;
  std::uint64_t taken_ = 0;  // since credit was raised
  std::optional<rpc::Reply> outcome_;
};

}  // namespace moolink::runtime
