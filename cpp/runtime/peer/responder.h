#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/thread_safety.h"
#include "base/time.h"
#include "rpc/node.h"
#include "runtime/engine/workers.h"
#include "runtime/peer/sender.h"
#include "wire/payload.h"

namespace moolink::runtime {

// The reply path of one call: sends the first reply, from any thread. If it is dropped without one,
// the caller is told at once. For a streamed call: items, as many as the caller takes, and then the
// reply.
class Responder {
 public:
  // `caller_group`: as in rpc::RunHandler. `credit`: items that the caller takes now; 0: it wants
  // one reply.
  Responder(std::shared_ptr<Sender> peer, rpc::CallKey key, std::string function,
            std::string caller_group, std::uint64_t credit, wire::Payload arguments)
      : peer_(std::move(peer)),
        key_(key),
        function_(std::move(function)),
        caller_group_(std::move(caller_group)),
        arguments_(std::move(arguments)),
        streamed_(credit > 0),
        allowed_(credit) {}
  ~Responder();
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;

  // The context of the peer that was called.
  const std::shared_ptr<Context>& context() const { return peer_->context(); }
  // The caller, which receives the reply and items.
  Recipient recipient() const { return {*peer_, key_.caller}; }
  // False if a reply was sent before.
  bool send(rpc::Reply reply) MOOLINK_UNLOCKED;
  bool sent() const { return sent_; }
  // Another object replies.
  void disown() { sent_ = true; }
  // The caller does not wait any more.
  bool cancelled() const { return cancelled_; }
  // Runs `task` on a worker as soon as cancelled() is true; never after a reply.
  void on_cancel(Task task) MOOLINK_UNLOCKED;
  const std::string& function() const { return function_; }
  const std::string& caller_group() const { return caller_group_; }
  const rpc::CallKey& key() const { return key_; }

  // The arguments of the call, for the first taker: the worker that begins the call, or the call's
  // end before that, so that cancelled calls that wait for a worker hold no memory.
  std::optional<wire::Payload> take_arguments() {
    if (taken_.exchange(true)) return std::nullopt;
    return std::move(arguments_);
  }

  // The thread that runs the handler; 0: none yet.
  struct Run {
    Time began{};
    int thread = 0;
  };
  void begin(Time now, int thread) {
    began_ = now;
    thread_.store(thread, std::memory_order_release);
  }
  Run run() const {
    const int thread = thread_.load(std::memory_order_acquire);
    return thread == 0 ? Run{} : Run{began_, thread};
  }

  // --- of a streamed call, by one thread at a time
  bool streamed() const { return streamed_; }
  bool has_room() const { return items_ < allowed_; }
  // Throws Exception{invalid_argument} if the item cannot travel, or there is no room.
  void send_item(wire::Payload item) MOOLINK_UNLOCKED;
  // Runs the task on a worker once there is room, or the caller does not wait any more. Keeps the
  // task and what it holds alive until then.
  void when_room(Task task) MOOLINK_UNLOCKED;

  void cancel() MOOLINK_LOCKED;
  void raise_credit(std::uint64_t allowed) MOOLINK_LOCKED;

 private:
  void resume() MOOLINK_LOCKED;

  std::shared_ptr<Sender> peer_;
  const rpc::CallKey key_;
  const std::string function_;
  const std::string caller_group_;
  wire::Payload arguments_;
  std::atomic<bool> taken_{false};
  std::atomic<bool> sent_{false};
  std::atomic<bool> cancelled_{false};
  const bool streamed_;
  std::atomic<std::uint64_t> allowed_;
  std::uint64_t items_ = 0;
  Tasks resume_ MOOLINK_GUARDED;  // one, or none
  Tasks on_cancel_ MOOLINK_GUARDED;
  Time began_{};  // written once, before thread_
  std::atomic<int> thread_{0};
};

// A call to be run by a handler.
struct Incoming {
  std::shared_ptr<Responder> responder;
  std::string caller;  // its name
  wire::Payload arguments;
  Time deadline;  // kNever: none
};

// Runs on a worker.
using CallHandler = std::function<void(Incoming)>;

}  // namespace moolink::runtime
