#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "collective/engine.h"
#include "runtime/engine/action_pump.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {

// Carries out a collective engine's messages and arithmetic. All calls, in both directions, are
// made with the engine's lock held.
class OperationRunner final : public std::enable_shared_from_this<OperationRunner> {
 public:
  struct Events {
    std::function<void(collective::Engine::Combine)> combine;  // may be empty
    std::function<void(collective::Engine::Done)> done;
    std::function<void(const Error&)> broken;  // from Engine::take_failure()
    // May be empty if no output is ever given.
    std::function<void(collective::Engine::Pass)> pass = {};
    std::function<void(collective::Engine::Abandon)> abandon = {};
  };

  // The scope distinguishes this engine's messages from those of others on the same peer; all are
  // of the group.
  static std::shared_ptr<OperationRunner> create(std::shared_ptr<RpcPeer> rpc, std::string group,
                                                 std::string scope, Events events);

  collective::Engine& engine() { return engine_; }
  // Carries out the engine's actions; call it after every event.
  void carry_out();
  // No event is reported from now on.
  void close();

 private:
  OperationRunner(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                  Events events);
  void perform(collective::Engine::Send& action);
  void perform(collective::Engine::Sum& action);
  void perform(collective::Engine::Combine& action) { events_.combine(std::move(action)); }
  void perform(collective::Engine::Pass& action);
  void perform(collective::Engine::Abandon& action) { events_.abandon(action); }
  void perform(collective::Engine::Done& action) { events_.done(std::move(action)); }
  void submit_sum(const collective::Engine::Sum& action);
  void no_thread(const Error& error);
  void end(const collective::Engine::Send& action, const Error& error);
  void end(const collective::Engine::Sum& action, const Error& error);
  void end(const collective::Engine::Combine& action, const Error& error);
  void end(const collective::Engine::Pass& action, const Error& error);
  void end(const collective::Engine::Abandon&, const Error&) {}
  void end(const collective::Engine::Done&, const Error&) {}  // its owner reports it

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_;
  const std::string scope_;
  Events events_;
  collective::Engine engine_;
  ActionPump pump_;
  bool lacks_thread_ = false;  // and that was reported
  bool closed_ = false;
};

}  // namespace moolink::runtime
