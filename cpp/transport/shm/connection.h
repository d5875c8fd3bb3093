#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/thread_safety.h"
#include "io/descriptor_passing.h"
#include "io/loop.h"
#include "memory/segment.h"
#include "transport/connection_base.h"
#include "transport/grant_pool.h"
#include "transport/shm/grant_filler.h"
#include "transport/shm/notice.h"
#include "transport/shm/ring.h"
#include "transport/shm/segments.h"

namespace moolink::transport::shm {

// Two rings, one for each direction. The Unix socket over which they were passed stays open. Its
// end of file means that the peer has closed it, and the pidfd means that the peer's process has
// ended. Both count only after the ring has been read to its end.
class ShmConnection final : public ConnectionBase, public io::Pollable {
 public:
  ShmConnection(Environment& environment, ConnectionOwner& owner, std::string dialled);
  ~ShmConnection() override;
  // One of these begins the handshake, once the owner knows the connection.
  void accept(Descriptor socket) MOOLINK_LOCKED;
  void dial(const std::string& abstract_name) MOOLINK_LOCKED;

  wire::PathKind path() const override { return wire::PathKind::shm; }

  std::optional<Grant> allocate_grant(std::size_t bytes) MOOLINK_LOCKED override;
  void fill_grant(const wire::GrantPlace& place, Buffer bytes) MOOLINK_LOCKED override;
  MutableBuffer grant_memory(const wire::GrantPlace& place) MOOLINK_LOCKED override;
  bool reads_device(int device) const MOOLINK_LOCKED override {
    return passed_.may_lend_of(device);
  }
  bool pass_segment(std::uint64_t segment) MOOLINK_LOCKED override;
  bool is_mapped(std::uint64_t segment) const MOOLINK_LOCKED override {
    return passed_.is_mapped(segment);
  }
  Buffer map_loan(const wire::LoanPlace& place) MOOLINK_LOCKED override;
  LentBytes lent_bytes(std::uint64_t segment) const MOOLINK_LOCKED override {
    return theirs_.bytes(segment);
  }
  bool share(const Uid& key, std::span<const int> descriptors) MOOLINK_LOCKED override;

  bool poll() MOOLINK_LOCKED override;
  bool prepare_sleep() MOOLINK_LOCKED override;
  void awake() MOOLINK_LOCKED override;

  void abandon() noexcept;

 private:
  // handshake.cc
  void connect(const std::string& abstract_name) MOOLINK_LOCKED;
  void greet() MOOLINK_LOCKED;
  void take_greeting() MOOLINK_LOCKED;
  void link(io::DescriptorMessage message) MOOLINK_LOCKED;

  void watch_peer() MOOLINK_LOCKED;
  bool receive() MOOLINK_LOCKED;
  bool fill() MOOLINK_LOCKED;
  void learn(SegmentId segment) MOOLINK_LOCKED;
  bool retire_grants() MOOLINK_LOCKED override { return grants_->retire_idle(); }
  bool take_notices() MOOLINK_LOCKED;
  void take_notice(io::DescriptorMessage message) MOOLINK_LOCKED;
  void tell_shared(const Uid& key, std::vector<Descriptor> descriptors) MOOLINK_LOCKED;
  void socket_ready() MOOLINK_LOCKED;
  void socket_ended() MOOLINK_LOCKED;
  void peer_exited() MOOLINK_LOCKED;
  void read_to_the_end() MOOLINK_LOCKED;
  void send_queued() MOOLINK_LOCKED override;
  void authenticated() MOOLINK_LOCKED override;
  void release() MOOLINK_LOCKED override;
  void close_descriptors() noexcept;

  Descriptor socket_;
  Descriptor pidfd_;                           // of the peer's process; empty: see open_pidfd()
  std::shared_ptr<memory::Segment> incoming_;  // during the handshake: the ring made here
  Descriptor bell_;                            // made here: the watched end
  Descriptor peer_bell_;                       // made by the peer: the end to ring
  // Empty during the handshake.
  std::optional<RingWriter> writer_;
  std::optional<RingReader> reader_;
  std::shared_ptr<GrantPool> grants_;
  GrantFiller filler_;
  PassedSegments passed_;
  PeerSegments theirs_;  // kept until destruction: holders of the connection read them
  std::vector<io::DescriptorMessage> early_notices_;  // arrived before this side was established
  bool heard_ = false;  // something after establish(): the peer has established it, too
  bool peer_said_bye_ = false;
  Listed<io::Pollable> polled_;
  io::Loop::Watch socket_watch_;
  io::Loop::Watch pidfd_watch_;
  io::Loop::Watch bell_watch_;
};

}  // namespace moolink::transport::shm
