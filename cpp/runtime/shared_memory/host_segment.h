#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/scoped.h"
#include "base/thread_safety.h"
#include "base/time.h"
#include "base/uid.h"
#include "collective/epoch_members.h"
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
class HostSegment final : public Forkable {
 public:
  struct Use {
    std::string what;      // names the segment in warnings: a plural
    rpc::Service service;  // carries its messages, under the scope
    // It is mapped here; may throw Exception if it is invalid.
    std::function<void()> attached;
    std::function<void()> ready;  // all hosts have attached
  };

  HostSegment(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope, Use use);
  ~HostSegment() override;

  void enter(Time now, const collective::SharedMembers& group) MOOLINK_LOCKED;
  // Drops the segment; ignores later messages about it.
  void leave() MOOLINK_LOCKED;
  void close() MOOLINK_LOCKED;
  void tick(Time now) MOOLINK_LOCKED;
  Time next_deadline() const MOOLINK_LOCKED { return share_at_; }

  const std::shared_ptr<memory::Segment>& segment() const MOOLINK_LOCKED { return segment_; }
  std::uint64_t epoch() const MOOLINK_LOCKED { return here_.empty() ? 0 : group_->epoch; }
  // By rank on this host; rank() is this member's.
  const Uid& instance(std::uint32_t rank) const MOOLINK_LOCKED {
    return (*group_)[here_[rank]].instance;
  }
  const std::string& name(std::uint32_t rank) const MOOLINK_LOCKED {
    return (*group_)[here_[rank]].name;
  }
  std::optional<std::uint32_t> rank_of(const Uid& instance) const MOOLINK_LOCKED;
  std::uint32_t rank() const MOOLINK_LOCKED { return rank_; }
  collective::PipelineLayout layout() const MOOLINK_LOCKED;
  void ring(std::uint32_t rank) const MOOLINK_LOCKED { io::ring(bells_[rank]); }

  void abandon() noexcept MOOLINK_LOCKED override;

 private:
  struct Message;
  struct Offer {
    Uid from;
    std::uint64_t epoch = 0;
    Uid key;
  };

  bool leads_group() const MOOLINK_LOCKED { return here_[rank_] == 0; }
  void make(Time now) MOOLINK_LOCKED;
  void share_with_all(Time now) MOOLINK_LOCKED;
  void tell_group(Time now) MOOLINK_LOCKED;
  // `to`: a rank of the group.
  void send(std::uint32_t to, const Message& message) MOOLINK_LOCKED;
  void received(const Uid& from, const wire::Payload& payload) MOOLINK_LOCKED;
  void take_offer(const Offer& offer) MOOLINK_LOCKED;
  void attach(std::vector<Descriptor> descriptors) MOOLINK_LOCKED;
  void attached(std::uint32_t rank) MOOLINK_LOCKED;
  void host_attached(std::uint32_t first) MOOLINK_LOCKED;
  void begin() MOOLINK_LOCKED;
  void warn(const Error& error) MOOLINK_LOCKED;

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_name_;
  const std::string scope_;
  Use use_;
  // Until close().
  Listed<Forkable> forks_;
  std::shared_ptr<void> routed_;

  collective::SharedMembers group_;
  std::vector<std::uint32_t> here_;  // its ranks that are on this host; empty: no segment
  std::uint32_t rank_ = 0;           // this member's place among them
  std::optional<Uid> key_;           // of the descriptors of this epoch
  std::set<std::uint32_t> untold_;   // at a host's first rank: those that did not get the segment
  std::set<std::uint32_t> waiting_;  // the same: those that have not attached
  std::set<std::uint32_t> hosts_waiting_;  // at the group's first rank: the hosts' first ranks
  Time share_at_ = kNever;                 // next attempt
  Duration share_pause_{};
  bool warned_ = false;         // that other hosts take long
  std::optional<Offer> early_;  // of an epoch that this member has not entered yet
  std::shared_ptr<memory::Segment> segment_;
  std::vector<Descriptor> bells_;    // by rank
  std::vector<Descriptor> watched_;  // their other ends: at rank 0 all, at others its own
  io::Loop::Watch bell_watch_;
};

}  // namespace moolink::runtime
