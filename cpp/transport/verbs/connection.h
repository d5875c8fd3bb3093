#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/loop.h"
#include "transport/frame_receiver.h"
#include "transport/send_queue.h"
#include "transport/transport.h"
#include "transport/verbs/arrivals.h"
#include "transport/verbs/device.h"
#include "transport/verbs/granted_memory.h"
#include "transport/verbs/packets.h"
#include "transport/verbs/queue_pairs.h"
#include "transport/verbs/writes.h"

namespace moolink::transport::verbs {

// Queue pairs, and the tcp connection over which they were agreed upon.
// docs/design/transport-verbs.md.
class VerbsConnection final : public Connection,
                              public io::Pollable,
                              public std::enable_shared_from_this<VerbsConnection> {
 public:
  // What a connection needs from its transport.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void opened(VerbsConnection& connection) = 0;  // report it to the handler
    // It was never opened, and will not be.
    virtual void not_opened(VerbsConnection& connection, const Error& error) = 0;
    virtual void ended(VerbsConnection& connection) = 0;  // the owner forgets it
  };

  // dialled: empty if it was accepted.
  VerbsConnection(Environment& environment, Owner& owner, std::shared_ptr<Device> device,
                  std::shared_ptr<Connection> control, std::string dialled);
  ~VerbsConnection() override;

  // The dialler sends first. Throws Exception if no queue pair can be made.
  void start();
  const std::string& dialled() const { return dialled_; }
  const Connection& control() const { return *control_; }
  const Device& device() const { return *device_; }

  wire::ConnectionId id() const override { return id_; }
  wire::PathKind path() const override { return wire::PathKind::verbs; }
  const wire::PathTraits& traits() const override { return traits_; }
  const std::string& peer_address() const override { return peer_address_; }
  std::string local_address() const override;
  void write(wire::Frame frame) override;
  void flush() override;
  std::size_t queued_bytes() const override { return queue_.bytes(); }
  bool writable() const override { return !queue_.full(); }
  void establish() override;
  void close() override;
  std::optional<Grant> allocate_grant(std::size_t bytes) override;
  void fill_grant(const wire::GrantPlace& place, Buffer bytes) override;
  bool reads_device(int device) const override;
  std::string refusal_of(const Buffer& bytes) override;

  bool poll() override;
  bool prepare_sleep() override;
  void awake() override {}

  // From the transport: messages and the end of the control connection, and events of the device.
  void told(const wire::ReceivedFrame& frame);
  void control_ended(const Error& error);
  void rung() { pairs_.rung(); }
  bool uses(const ibv_qp* pair) const { return pairs_.include(pair); }
  void fail(Error error) noexcept;

  // Closes at once without reporting it.
  void drop();

 private:
  enum class State { agreeing, open, closing, closed };

  void agree(const wire::ReceivedFrame& frame);
  void say_endpoint();
  void open();
  bool take_completions();
  void take(const Completion& completion);
  void take_arrival(const Completion& completion);
  void read(std::span<const std::byte> bytes);
  void read_held();
  bool send_queued();
  bool write_grants();
  void give_credits();
  void tell_writable();
  void retire_idle_grants();
  void linger();
  void leave_if_done();
  void finish() noexcept;
  void end();
  Error lost(const std::string& why) const;
  Error with_peer(const Error& error) const;
  template <class Work>
  bool guarded(Work&& work) noexcept;

  static constexpr std::size_t kHighWater = std::size_t{4} << 20;
  static constexpr std::size_t kLowWater = std::size_t{1} << 20;

  Environment& environment_;
  Owner& owner_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<Connection> control_;
  const std::string dialled_;
  const wire::ConnectionId id_;
  wire::PathTraits traits_;
  std::string peer_address_;
  QueuePairs pairs_;
  PacketWriter packets_;
  SendQueue queue_{kLowWater, kHighWater};
  Arrivals arrivals_;
  FrameReceiver receiver_;
  GrantedMemory grants_;
  Writes writes_;

  State state_ = State::agreeing;
  bool registered_ = false;  // with the loop
  bool connected_ = false;   // the queue pairs can receive
  bool failed_ = false;
  bool finishing_ = false;
  bool established_ = false;
  Error failure_;
  io::Loop::TimerKey timer_{};                    // the end of closing, or of draining
  std::optional<io::Loop::TimerKey> idle_timer_;  // while there are grants that may fall idle
};

}  // namespace moolink::transport::verbs
