#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/time.h"
#include "base/uid.h"
#include "collective/engine.h"
#include "io/doorbell.h"
#include "io/loop.h"
#include "memory/segment.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {

// A segment for one epoch that all members map, with a doorbell for each, while all of them are on
// one host and reach one another through shared memory; otherwise there is none.
// docs/design/protocol/shared_memory.md.
//
// Rank 0 makes both, shares them with every other rank and names them in OFFER; each answers
// ATTACHED; when all have, READY goes to all. No rank uses the segment before. All calls, in both
// directions, are made with the engine's lock held.
class HostSegment final : public Forkable, public std::enable_shared_from_this<HostSegment> {
 public:
  using Members = collective::Engine::Members;
  struct Use {
    std::string what;      // names the segment in warnings: a plural
    rpc::Service service;  // carries its messages, under the scope
    std::function<std::uint64_t(const Members&)> bytes;
    std::function<void(std::span<std::byte>, const Members&)> initialise;
    // It is mapped here; may throw Exception if it is invalid.
    std::function<void()> attached;
    std::function<void()> ready;  // all members have attached
  };

  static std::shared_ptr<HostSegment> create(std::shared_ptr<RpcPeer> rpc, std::string group,
                                             std::string scope, Use use);

  void enter(Time now, Members members);
  // Drops the segment; ignores later messages about it.
  void leave();
  void close();
  void tick(Time now);
  Time next_deadline() const { return share_at_; }

  const std::shared_ptr<memory::Segment>& segment() const { return segment_; }
  const Members& members() const { return members_; }
  std::uint32_t rank() const { return rank_; }
  void ring(std::uint32_t rank) const { io::ring(bells_[rank]); }

  void abandon() noexcept override;

 private:
  struct Message;
  struct Offer {
    Uid from;
    std::uint64_t epoch = 0;
    Uid key;
  };

  HostSegment(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope, Use use);
  std::optional<std::uint32_t> rank_of(const Uid& instance) const;
  void make(Time now);
  void share_with_all(Time now);
  void send(std::uint32_t rank, const Message& message);
  void received(const Uid& from, const wire::Payload& payload);
  void take_offer(const Offer& offer);
  void attach(std::vector<Descriptor> descriptors);
  void attached(std::uint32_t rank);
  void begin();
  void warn(const Error& error);

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_;
  const std::string scope_;
  Use use_;
  bool closed_ = false;

  Members members_;
  std::uint32_t rank_ = 0;
  Uid key_;                          // of the descriptors of this epoch
  std::set<std::uint32_t> untold_;   // rank 0's: ranks that did not get the segment yet
  std::set<std::uint32_t> waiting_;  // rank 0's: ranks that have not attached
  Time share_at_ = kNever;           // next attempt
  Duration share_pause_{};
  std::optional<Offer> early_;  // of an epoch that this member has not entered yet
  std::shared_ptr<memory::Segment> segment_;
  std::vector<Descriptor> bells_;    // by rank
  std::vector<Descriptor> watched_;  // their other ends: at rank 0 all, at others its own
  io::Loop::WatchId bell_watch_ = 0;
};

}  // namespace moolink::runtime
