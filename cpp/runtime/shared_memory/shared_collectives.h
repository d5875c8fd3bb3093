#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/scoped.h"
#include "base/time.h"
#include "collective/shared_pipeline.h"
#include "io/loop.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/shared_memory/host_segment.h"

namespace moolink::runtime {

// Passes a group's collectives, or an accumulator's rounds, through a segment of each host:
// collective/shared_pipeline.h advances whenever a thread polls the loop. All calls, in both
// directions, are made with the engine's lock held.
class SharedCollectives final : public io::Pollable,
                                private PeerObserver,
                                public std::enable_shared_from_this<SharedCollectives> {
 public:
  using Members = HostSegment::Members;
  struct Events {
    std::function<void(std::uint64_t epoch)> ready;               // all members can take part
    std::function<void(std::uint64_t s)> ended;                   // its result is in its output
    std::function<void(collective::SharedPipeline::Sum)> summed;  // of an exchanged operation
    std::function<void(const Error& error)> broken;               // no operation can pass any more
  };

  // `what` names the operations in warnings, as a plural; `service` carries the messages about the
  // segment.
  SharedCollectives(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                    std::string what, rpc::Service service, Events events);

  // Gives up the segment of the epoch before, for all its ranks.
  void leave();
  void enter(Time now, const Members& members) { segment_.enter(now, members); }
  // If it throws, this rank can take part in no later operation of the epoch either.
  void start(collective::PipelineOperation operation);
  void publish(std::uint64_t s, std::uint32_t chunk, Buffer result);
  void abandon(std::uint64_t s);
  void close();

  void tick(Time now) { segment_.tick(now); }
  Time next_deadline() const { return segment_.next_deadline(); }
  // Ranks of the segment; 0: there is none.
  std::uint32_t ranks() const { return pipeline_ ? pipeline_->layout().ranks : 0; }
  // Operations that have ended here have ended at the others too.
  bool ended_everywhere() const { return !pipeline_ || pipeline_->taken_by_all(); }
  // Names of the members of this host that the operation under way waits for.
  std::vector<std::string> waiting_for() const;

  bool poll() override;
  bool prepare_sleep() override;
  void awake() override {
    if (pipeline_) pipeline_->awake();
  }

 private:
  void connection_ended(const Uid& instance,
                        const std::shared_ptr<transport::Connection>& connection) override;
  void failed(const Error& error) override { events_.broken(error); }
  collective::LentPlace place(const std::byte* data, std::size_t size) const;
  LentBytes lent_by(std::uint32_t rank, std::uint64_t segment) const;
  void attach();
  bool advance();
  void take_ended();
  void take_sums();

  std::shared_ptr<RpcPeer> rpc_;
  Events events_;
  HostSegment segment_;
  // Connections of members that ended in this epoch. A member may still name memory that it lent
  // through one: it may learn of the end later.
  std::vector<std::pair<Uid, std::shared_ptr<transport::Connection>>> ended_;
  std::unique_ptr<collective::SharedPipeline> pipeline_;
  // The others are in a newer epoch. The message about it is in transit, and fails running
  // operations.
  bool outdated_ = false;
  bool closed_ = false;
  Listed<PeerObserver> observes_;
};

}  // namespace moolink::runtime
