#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "runtime/engine/context.h"
#include "runtime/peer/responder.h"

namespace moolink::runtime {

// The functions that a peer defines, and the handlers that run for others: each from start() until
// it has returned, and has replied or must not any more. The Node decides which calls run, and when
// one is unwanted (rpc::Handlers); this runs them on workers, and holds back those whose caller
// takes no results. RpcPeer owns it and carries out the Node's actions here, with the engine's
// lock; only run() is called without it, on a worker, which keeps the peer alive. fail_all() ends
// it; replies of handlers that still run are dropped.
class Functions {
 public:
  struct Function {
    CallHandler handler;
    std::size_t running = 0;       // calls not yet returned, queued ones too
    std::vector<Waiter*> drained;  // undefine() waits here
  };
  struct Handling {
    std::weak_ptr<Responder> responder;
    std::string caller;
    Time arrived{};
    // Runs the handler once its caller takes results again; empty: it is not held back.
    Tasks held{};
    bool replied = false;
    bool unwanted = false;
    bool returned = false;
  };

  explicit Functions(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  // Throws Exception{invalid_argument} if the name is taken.
  void define(const std::string& name, CallHandler handler) MOOLINK_LOCKED;
  // Null: it is not defined. The result is destroyed without the lock.
  std::shared_ptr<Function> undefine(const std::string& name) MOOLINK_LOCKED;
  // Until no call of it runs, unless this thread runs one.
  void wait_until_drained(Engine::Lock& lock, Function& function,
                          const Engine::Interrupt& interrupt) MOOLINK_LOCKED;

  // ---- handlers ----

  // Null: it is over, or was never started.
  Handling* find(const rpc::CallKey& key) MOOLINK_LOCKED {
    const auto found = running_.find(key);
    return found == running_.end() ? nullptr : &found->second;
  }
  // Runs the handler of a defined function on a worker. `peer` owns this. Throws if it cannot.
  void start(const std::shared_ptr<Sender>& peer, rpc::RunHandler& action, Time now) MOOLINK_LOCKED;
  // No reply is needed any more: it has replied, or its caller does not wait.
  void replied(const rpc::CallKey& key, Handling& handling) MOOLINK_LOCKED;
  void cancel(const rpc::CallKey& key, Handling& handling) MOOLINK_LOCKED;
  void hold(const Uid& caller, bool holds) MOOLINK_LOCKED;
  // Whether this thread runs a handler of this peer.
  bool run_here() const;

  // For `within` at most, until only those of this thread run. Releases the lock meanwhile.
  void wait_until_idle(Engine::Lock& lock, Duration within) MOOLINK_LOCKED;
  // The peer has closed.
  void fail_all() MOOLINK_LOCKED;

  std::uint64_t received() const MOOLINK_LOCKED { return received_; }
  std::uint64_t running() const MOOLINK_LOCKED { return not_returned_; }
  void describe(Time now, std::size_t most, const std::string& indent, std::string& text) const
      MOOLINK_LOCKED;

 private:
  bool hold_back(const std::shared_ptr<Functions>& self, const std::shared_ptr<Function>& function,
                 const Incoming& incoming) MOOLINK_UNLOCKED;
  void run(const std::shared_ptr<Functions>& self, const std::shared_ptr<Function>& function,
           Incoming incoming) MOOLINK_UNLOCKED;
  void forget_if_over(const rpc::CallKey& key, const Handling& handling) MOOLINK_LOCKED;

  const std::shared_ptr<Context> context_;
  std::map<std::string, std::shared_ptr<Function>> functions_ MOOLINK_GUARDED;
  std::map<rpc::CallKey, Handling> running_ MOOLINK_GUARDED;
  std::set<Uid> held_callers_ MOOLINK_GUARDED;  // see rpc::HoldHandlers
  std::atomic<bool> holds_any_{false};          // workers look there under the lock only then
  std::uint64_t received_ MOOLINK_GUARDED = 0;
  std::uint64_t not_returned_ MOOLINK_GUARDED = 0;
  Waiter* idle_ MOOLINK_GUARDED = nullptr;  // wait_until_idle() waits until `idle_at_` run
  std::uint64_t idle_at_ MOOLINK_GUARDED = 0;
};

}  // namespace moolink::runtime
