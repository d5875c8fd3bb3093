#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/time.h"
#include "base/uid.h"
#include "collective/engine.h"
#include "collective/pipeline_segment.h"
#include "io/doorbell.h"
#include "io/loop.h"
#include "memory/segment.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {

// A segment for one epoch on each host of a group, with a doorbell for each member of the host; all
// of them map both. There is none unless some host has several members, no host has more than 64,
// and the first rank of a host reaches each other rank there through shared memory.
// docs/design/protocol/shared_memory.md.
//
// The first rank of a host makes segment and doorbells, shares them with the others there and names
// them in OFFER; each answers ATTACHED. When all have, the first rank sends ATTACHED to rank 0 of
// the group. When all hosts have, rank 0 sends READY to all. No rank uses a segment before READY.
// All calls, in both directions, are made with the engine's lock held.
class HostSegment final : public Forkable {
 public:
  using Members = collective::Engine::Members;
  struct Use {
    std::string what;      // names the segment in warnings: a plural
    rpc::Service service;  // carries its messages, under the scope
    // It is mapped here; may throw Exception if it is invalid.
    std::function<void()> attached;
    std::function<void()> ready;  // all hosts have attached
  };

  HostSegment(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope, Use use);
  ~HostSegment() override;

  void enter(Time now, const Members& group);
  // Drops the segment; ignores later messages about it.
  void leave();
  void close();
  void tick(Time now);
  Time next_deadline() const { return share_at_; }

  const std::string& group_name() const { return group_name_; }
  const std::shared_ptr<memory::Segment>& segment() const { return segment_; }
  // Those of this host, and this one's place among them.
  const Members& members() const { return members_; }
  std::uint32_t rank() const { return rank_; }
  collective::PipelineLayout layout() const;
  void ring(std::uint32_t rank) const { io::ring(bells_[rank]); }

  void abandon() noexcept override;

 private:
  struct Message;
  struct Offer {
    Uid from;
    std::uint64_t epoch = 0;
    Uid key;
  };

  std::optional<std::uint32_t> rank_of(const Uid& instance) const;
  bool leads_group() const { return first_.instance == rpc_->instance(); }
  void make(Time now);
  void share_with_all(Time now);
  void tell_group(Time now);
  struct Peer {
    Uid instance;
    std::string name;
  };
  void send(const Peer& to, const Message& message);
  Peer peer(std::uint32_t rank) const { return {members_.instances[rank], members_.names[rank]}; }
  void received(const Uid& from, const wire::Payload& payload);
  void take_offer(const Offer& offer);
  void attach(std::vector<Descriptor> descriptors);
  void attached(std::uint32_t rank);
  void host_attached(const Uid& first);
  void begin();
  void warn(const Error& error);

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_name_;
  const std::string scope_;
  Use use_;
  std::shared_ptr<void> routed_;  // until close()

  Members members_;  // of this host
  std::uint32_t rank_ = 0;
  Peer first_;                       // rank 0 of the group
  std::optional<Uid> key_;           // of the descriptors of this epoch
  std::set<std::uint32_t> untold_;   // at a host's first rank: those that did not get the segment
  std::set<std::uint32_t> waiting_;  // the same: those that have not attached
  std::set<Uid> hosts_waiting_;      // at the group's first rank: the hosts' first ranks
  std::vector<Peer> group_;          // the same: all other members
  Time share_at_ = kNever;           // next attempt
  Duration share_pause_{};
  bool warned_ = false;         // that other hosts take long
  std::optional<Offer> early_;  // of an epoch that this member has not entered yet
  std::shared_ptr<memory::Segment> segment_;
  std::vector<Descriptor> bells_;    // by rank
  std::vector<Descriptor> watched_;  // their other ends: at rank 0 all, at others its own
  io::Loop::WatchId bell_watch_ = 0;
};

}  // namespace moolink::runtime
