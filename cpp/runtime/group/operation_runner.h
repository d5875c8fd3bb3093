#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/engine.h"
#include "runtime/engine/action_pump.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/shared_memory/shared_collectives.h"

namespace moolink::runtime {

// Carries out a collective engine's messages, its arithmetic, and its operations in the segment of
// its members' host. All calls, in both directions, are made with the engine's lock held.
class OperationRunner final : public std::enable_shared_from_this<OperationRunner> {
 public:
  struct Events {
    std::function<void(collective::Engine::Combine)> combine;  // may be empty
    std::function<void(collective::Engine::Done)> done;
    std::function<void(const Error&)> broken;  // from Engine::take_failure()
    // All members of the epoch can use the segment.
    std::function<void(std::uint64_t epoch)> shares;
    // No member can use it any more: the members disagree, or this one cannot continue.
    std::function<void(const Error&)> disagreed;
  };
  struct Segment {
    std::string scope;
    std::string what;      // names it in warnings: a plural
    rpc::Service service;  // carries the messages about it
  };

  // The scope distinguishes this engine's messages from those of others on the same peer; all are
  // of the group.
  OperationRunner(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                  Segment segment, Events events);
  ~OperationRunner();

  collective::Engine& engine() { return engine_; }
  // See Engine::set_members(). Gives up the segment of the epoch before, for all its ranks.
  void enter(Time now, const collective::Engine::Members& members, const Error& reason);
  void leave_segment() { shared_->leave(); }
  // Memory for an input of an operation with Options::shared. The other members read it in place if
  // they can.
  MutableBuffer input(std::size_t bytes);
  void tick(Time now) { shared_->tick(now); }
  Time next_deadline() const { return shared_->next_deadline(); }
  void inputs_written();  // see Engine::inputs_written()
  // The others need nothing more from this member's part of the segment for operations that have
  // ended here.
  bool ended_everywhere() const { return shared_->ended_everywhere(); }
  std::vector<std::string> waiting_for(collective::OpId op) const;
  // Carries out the engine's actions; call it after every event.
  void carry_out();
  // No event is reported from now on.
  void close();

 private:
  void perform(collective::Engine::Send& action);
  void perform(collective::Engine::Sum& action);
  void perform(collective::Engine::Combine& action) { events_.combine(std::move(action)); }
  void perform(collective::Engine::Pass& action);
  void perform(collective::Engine::Publish& action) {
    shared_->publish(action.s, action.chunk, std::move(action.result));
  }
  void perform(collective::Engine::Abandon& action) { shared_->abandon(action.s); }
  void perform(collective::Engine::Done& action) { events_.done(std::move(action)); }
  void submit_sum(const collective::Engine::Sum& action);
  void no_thread(const Error& error);
  // Other actions belong to an operation, which fails at all members.
  void end(const collective::Engine::Send& action, const Error& error) {
    rpc_->fail_peer(action.instance, error);
  }
  void end(const collective::Engine::Sum& action, const Error& error);
  void end(const collective::Engine::Combine& action, const Error& error) {
    engine_.cancel(action.op, error);
  }
  // The operations of a segment pass in one order at all ranks: this one cannot leave one out.
  void end(const collective::Engine::Pass&, const Error& error) { events_.disagreed(error); }
  void end(const collective::Engine::Publish& action, const Error& error) {
    engine_.failed(action.s, error);
  }
  void end(const collective::Engine::Abandon&, const Error&) {}
  void end(const collective::Engine::Done&, const Error&) {}  // its owner reports it

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_;
  const std::string scope_;
  Events events_;
  collective::Engine engine_;
  std::shared_ptr<void> routed_;  // until close()
  std::shared_ptr<SharedCollectives> shared_;
  ActionPump pump_;
  bool lacks_thread_ = false;  // and that was reported
};

}  // namespace moolink::runtime
