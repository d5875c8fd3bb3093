#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/uid.h"
#include "collective/shared_pipeline.h"
#include "memory/segment.h"
#include "runtime/peer/rpc_peer.h"
#include "runtime/shared_memory/host_segment.h"

namespace moolink::runtime {

// The memory that the members of one host lend one another for an epoch: segments of their lending
// pools, each mapped for reading by all others before use. docs/design/protocol/shared_memory.md.
// All calls, in both directions, are made with the engine's lock held.
class HostLoans final {
 public:
  HostLoans(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope);
  ~HostLoans();

  void enter(HostSegment::Members members, std::uint32_t rank);
  // Unmaps the segments lent by others.
  void leave();
  void close();
  // Called now and then: the others unmap what the lending pool has freed.
  void take_back_freed();

  // The place where all others read these bytes. Empty: they are not in the lending pool, or some
  // member has not mapped them, which this requests.
  collective::LentPlace place(const std::byte* data, std::size_t size);
  // What a rank has lent under a number; empty: nothing that is mapped here.
  std::span<const std::byte> lent_by(std::uint32_t rank, std::uint64_t number) const;

 private:
  struct Message;
  struct Mine {
    Uid key;                          // of its descriptor
    std::set<std::uint32_t> untold;   // ranks that did not get it yet
    std::set<std::uint32_t> waiting;  // ranks that have not mapped it
  };
  struct Theirs {
    Uid key;  // until it arrives
    std::shared_ptr<memory::Segment> segment;
  };
  using Number = std::pair<std::uint32_t, std::uint64_t>;  // rank, segment

  void lend(std::uint64_t number, Mine& mine);
  void send(std::uint32_t rank, Message message);
  void received(const Uid& from, const wire::Payload& payload);
  void borrow(Number number, const Uid& key);
  void map(Number number, std::vector<Descriptor> descriptors);

  std::shared_ptr<RpcPeer> rpc_;
  const std::string group_;
  const std::string scope_;
  bool closed_ = false;
  HostSegment::Members members_;
  std::uint32_t rank_ = 0;
  std::uint64_t retired_ = 0;  // of the pool, at the last look
  std::map<std::uint64_t, Mine> mine_;
  std::map<Number, Theirs> theirs_;
};

}  // namespace moolink::runtime
