#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/scoped.h"
#include "base/thread_safety.h"
#include "collective/engine.h"
#include "collective/shared_pipeline.h"
#include "io/loop.h"
#include "runtime/engine/action_pump.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/shared_memory/host_segment.h"

namespace moolink::runtime {

// Carries out a collective engine's messages and its arithmetic, and passes its operations through
// the segment of the members on this host: the SharedPipeline advances whenever a thread polls the
// loop.
class OperationRunner final : public io::Pollable,
                              private PeerObserver,
                              public std::enable_shared_from_this<OperationRunner> {
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
                  const Segment& segment, Events events);
  ~OperationRunner() override;

  collective::Engine& engine() MOOLINK_LOCKED { return engine_; }
  // See Engine::set_members(). Gives up the segment of the epoch before, for all its ranks.
  void enter(Time now, const collective::SharedMembers& members, const Error& reason)
      MOOLINK_LOCKED;
  void leave_segment() MOOLINK_LOCKED;
  // Memory for an input of an operation with Options::shared. The other members read it in place if
  // they can.
  MutableBuffer input(std::size_t bytes) MOOLINK_LOCKED;
  void tick(Time now) MOOLINK_LOCKED { segment_.tick(now); }
  Time next_deadline() const MOOLINK_LOCKED { return segment_.next_deadline(); }
  void inputs_written() MOOLINK_LOCKED;  // see Engine::inputs_written()
  // The others need nothing more from this member's part of the segment for operations that have
  // ended here.
  bool ended_everywhere() const MOOLINK_LOCKED { return !pipeline_ || pipeline_->taken_by_all(); }
  std::vector<std::string> waiting_for(collective::OpId op) const MOOLINK_LOCKED;
  // Carries out the engine's actions; call it after every event.
  void carry_out() MOOLINK_LOCKED;
  // No event is reported from now on.
  void close() MOOLINK_LOCKED;

  // --- Pollable
  bool poll() MOOLINK_LOCKED override;
  bool prepare_sleep() MOOLINK_LOCKED override;
  void awake() MOOLINK_LOCKED override {
    if (pipeline_) pipeline_->awake();
  }

 private:
  void perform(collective::Engine::Send& action) MOOLINK_LOCKED;
  void perform(collective::Engine::Sum& action) MOOLINK_LOCKED;
  void perform(collective::Engine::Combine& action) MOOLINK_LOCKED {
    events_.combine(std::move(action));
  }
  void perform(collective::Engine::Pass& action) MOOLINK_LOCKED;
  void perform(collective::Engine::Publish& action) MOOLINK_LOCKED;
  void perform(collective::Engine::Abandon& action) MOOLINK_LOCKED;
  void perform(collective::Engine::Done& action) MOOLINK_LOCKED { events_.done(std::move(action)); }
  void submit_sum(const collective::Engine::Sum& action) MOOLINK_LOCKED;
  void no_thread(const Error& error) MOOLINK_LOCKED;
  // Other actions belong to an operation, which fails at all members.
  void end(const collective::Engine::Send& action, const Error& error) MOOLINK_LOCKED {
    rpc_->fail_peer(action.instance, error);
  }
  void end(const collective::Engine::Sum& action, const Error& error) MOOLINK_LOCKED;
  template <class OfOperation>
  void end(const OfOperation& action, const Error& error) MOOLINK_LOCKED {
    engine_.cancel(action.op, error);
  }
  // The operations of a segment pass in one order at all ranks: this one cannot leave one out.
  void end(const collective::Engine::Pass&, const Error& error) MOOLINK_LOCKED {
    events_.disagreed(error);
  }
  void end(const collective::Engine::Abandon&, const Error&) MOOLINK_LOCKED {}
  void end(const collective::Engine::Done&, const Error&) MOOLINK_LOCKED {}  // its owner reports it

  void connection_ended(const Uid& instance,
                        const std::shared_ptr<transport::Connection>& connection)
      MOOLINK_LOCKED override;
  void failed(const Error& error) MOOLINK_LOCKED override { events_.disagreed(error); }
  void attach() MOOLINK_LOCKED;
  collective::LentPlace place(const std::byte* data, std::size_t size) const MOOLINK_LOCKED;
  LentBytes lent_by(std::uint32_t rank, std::uint64_t segment) const MOOLINK_LOCKED;
  bool advance() MOOLINK_LOCKED;
  void take_sums() MOOLINK_LOCKED;
  void take_ended() MOOLINK_LOCKED;

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_;
  const std::string scope_;
  Events events_;
  collective::Engine engine_;
  HostSegment segment_;
  // Connections of members that ended in this epoch. A member may still name memory that it lent
  // through one: it may learn of the end later.
  std::vector<std::pair<Uid, std::shared_ptr<transport::Connection>>> ended_;
  std::unique_ptr<collective::SharedPipeline> pipeline_;  // once all of the host are attached
  // The others are in a newer epoch. The message about it is in transit, and fails running
  // operations.
  bool outdated_ = false;
  std::shared_ptr<void> routed_;  // until close()
  Listed<PeerObserver> observes_;
  Listed<io::Pollable> polled_;
  ActionPump pump_;
  bool lacks_thread_ = false;  // and that was reported
};

}  // namespace moolink::runtime
