#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "io/descriptor_passing.h"
#include "io/loop.h"
#include "transport/frame_receiver.h"
#include "transport/grant_pool.h"
#include "transport/send_queue.h"
#include "transport/shm/grant_filler.h"
#include "transport/shm/handshake.h"
#include "transport/shm/notice.h"
#include "transport/shm/ring.h"
#include "transport/shm/segments.h"
#include "transport/transport.h"

namespace moolink::transport::shm {

// Two rings, one for each direction. The Unix socket of the handshake stays: its end of file means
// that the peer closed, the pidfd that its process is dead; both only count after the ring was read
// to its end.
class ShmConnection final : public Connection,
                            public io::Pollable,
                            public std::enable_shared_from_this<ShmConnection> {
 public:
  // What a connection needs from its transport.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void ended(wire::ConnectionId id) = 0;        // it is over; the owner forgets it
    virtual void established(wire::ConnectionId id) = 0;  // its peer is authenticated
  };

  ShmConnection(Environment& environment, Owner& owner, Link link);
  ~ShmConnection() override;

  void start();  // once the handler knows it

  wire::ConnectionId id() const override { return id_; }
  wire::PathKind path() const override { return wire::PathKind::shm; }
  const wire::PathTraits& traits() const override { return traits_; }
  const std::string& peer_address() const override { return peer_address_; }
  void write(wire::Frame frame) override;
  void flush() override;
  std::size_t queued_bytes() const override { return queue_.bytes(); }
  bool writable() const override { return !queue_.full(); }
  void establish() override;
  void close() override;
  std::optional<Grant> allocate_grant(std::size_t bytes) override;
  void fill_grant(const wire::GrantPlace& place, Buffer bytes) override;
  MutableBuffer grant_memory(const wire::GrantPlace& place) override;
  bool reads_device(int device) const override { return passed_.may_lend_of(device); }
  bool pass_segment(std::uint64_t segment) override;
  bool is_mapped(std::uint64_t segment) const override { return passed_.is_mapped(segment); }
  Buffer map_loan(const wire::LoanPlace& place) override;
  LentBytes lent_bytes(std::uint64_t segment) const override { return theirs_.bytes(segment); }
  bool share(const Uid& key, std::span<const int> descriptors) override;

  bool poll() override;
  bool prepare_sleep() override;
  void awake() override;

  // Ends it, and reports the error to the handler.
  void fail(Error error, bool peer_dead) noexcept;
  // Fails an unauthenticated connection to make room for others.
  void make_room();
  // Closes at once without reporting it.
  void drop();
  void abandon() noexcept;

 private:
  enum class State { open, closing, closed };

  template <class Work>
  bool guarded(Work&& work) noexcept;
  bool receive();
  void watch_peer();
  bool fill();
  void learn(SegmentId segment);
  void retire_idle_grants();
  bool take_notices();
  void take_notice(io::DescriptorMessage message);
  void tell_shared(const Uid& key, std::vector<Descriptor> descriptors);
  void socket_ready();
  void socket_ended();
  void peer_exited();
  void read_to_the_end();
  void send_queued();
  void write_queued();
  void finish_close();
  void set_timer(Duration after, std::function<void()> due);
  void end(const Error& error, bool tell, bool peer_dead);
  Error with_peer(const Error& error) const;

  static constexpr std::size_t kHighWater = std::size_t{4} << 20;
  static constexpr std::size_t kLowWater = std::size_t{1} << 20;

  Environment& environment_;
  Owner& owner_;
  const wire::ConnectionId id_;
  wire::PathTraits traits_;
  std::string peer_address_;
  Descriptor socket_;
  std::optional<Descriptor> pidfd_;
  Descriptor bell_;       // the watched end
  Descriptor peer_bell_;  // the end to ring
  RingWriter writer_;
  RingReader reader_;
  FrameReceiver receiver_;
  SendQueue queue_{kLowWater, kHighWater};
  std::shared_ptr<GrantPool> grants_;
  GrantFiller filler_;
  PassedSegments passed_;
  PeerSegments theirs_;  // kept until destruction: holders of the connection read them
  std::vector<io::DescriptorMessage> early_notices_;  // arrived before this side was established

  State state_ = State::open;
  bool established_ = false;
  bool heard_ = false;  // something since then: the peer has established it, too
  bool peer_said_bye_ = false;
  bool end_of_file_ = false;
  bool failed_ = false;
  io::Loop::WatchId socket_watch_ = 0;
  io::Loop::WatchId pidfd_watch_ = 0;
  io::Loop::WatchId bell_watch_ = 0;
  io::Loop::TimerKey timer_{};                    // handshake; proof of death; end of closing
  std::optional<io::Loop::TimerKey> idle_timer_;  // while there are grants that may fall idle
};

}  // namespace moolink::transport::shm
