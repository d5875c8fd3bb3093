#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_safety.h"
#include "io/loop.h"
#include "transport/connection_base.h"
#include "transport/verbs/arrivals.h"
#include "transport/verbs/device.h"
#include "transport/verbs/granted_memory.h"
#include "transport/verbs/packets.h"
#include "transport/verbs/queue_pairs.h"
#include "transport/verbs/writes.h"

namespace moolink::transport::verbs {

// Queue pairs, and the tcp connection over which they were agreed upon.
// docs/design/transport-verbs.md.
class VerbsConnection final : public ConnectionBase, public io::Pollable {
 public:
  // dialled: empty if it was accepted.
  VerbsConnection(Environment& environment, ConnectionOwner& owner, std::shared_ptr<Device> device,
                  std::shared_ptr<Connection> control, std::string dialled);
  ~VerbsConnection() override;

  // The dialler sends first. Throws Exception if no queue pair can be made.
  void start() MOOLINK_LOCKED;
  const Device& device() const { return *device_; }

  wire::PathKind path() const override { return wire::PathKind::verbs; }
  std::string local_address() const MOOLINK_LOCKED override;
  void close() MOOLINK_LOCKED override;
  std::optional<Grant> allocate_grant(std::size_t bytes) MOOLINK_LOCKED override;
  void fill_grant(const wire::GrantPlace& place, Buffer bytes) MOOLINK_LOCKED override;
  bool reads_device(int device) const MOOLINK_LOCKED override;
  std::string refusal_of(const Buffer& bytes) MOOLINK_LOCKED override;

  bool poll() MOOLINK_LOCKED override;
  bool prepare_sleep() MOOLINK_LOCKED override;
  void awake() MOOLINK_LOCKED override {}

  // From the transport: messages and the end of the control connection, and events of the device.
  void told(const wire::ReceivedFrame& frame) MOOLINK_LOCKED;
  void control_ended(const Error& error) MOOLINK_LOCKED;
  void rung() MOOLINK_LOCKED { pairs_.rung(); }
  bool uses(const ibv_qp* pair) const MOOLINK_LOCKED { return pairs_.include(pair); }
  void fail(Error error, bool peer_dead = false) noexcept MOOLINK_LOCKED override;

 private:
  void agree(const wire::ReceivedFrame& frame) MOOLINK_LOCKED;
  void say_endpoint() MOOLINK_LOCKED;
  bool take_completions() MOOLINK_LOCKED;
  void take(const Completion& completion) MOOLINK_LOCKED;
  void take_arrival(const Completion& completion) MOOLINK_LOCKED;
  void read(std::span<const std::byte> bytes) MOOLINK_LOCKED;
  void read_held() MOOLINK_LOCKED;
  void send_queued() MOOLINK_LOCKED override;
  bool write_grants() MOOLINK_LOCKED;
  void give_credits() MOOLINK_LOCKED;
  bool retire_grants() MOOLINK_LOCKED override { return grants_.retire_idle(); }
  void linger() MOOLINK_LOCKED;
  void leave_if_done() MOOLINK_LOCKED;
  void finish() noexcept MOOLINK_LOCKED;
  void authenticated() MOOLINK_LOCKED override { control_->establish(); }
  void finish_close() MOOLINK_LOCKED override;
  void release() MOOLINK_LOCKED override;
  Error lost(const std::string& why) const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<Connection> control_;
  QueuePairs pairs_;
  PacketWriter packets_;
  Arrivals arrivals_;
  GrantedMemory grants_;
  Writes writes_;

  bool connected_ = false;  // the queue pairs can receive
  bool finishing_ = false;
  Error failure_;
  Listed<io::Pollable> polled_;
};

}  // namespace moolink::transport::verbs
