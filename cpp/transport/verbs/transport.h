#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/thread_safety.h"
#include "io/loop.h"
#include "transport/tcp/transport.h"
#include "transport/transport.h"
#include "transport/verbs/connection.h"
#include "transport/verbs/device.h"

namespace moolink::transport::verbs {

// RDMA, over one port of one device. docs/design/transport-verbs.md.
class VerbsTransport final : public Transport, private Handler, public ConnectionOwner {
 public:
  // Opens the device. Throws Exception{error} with the reason if it cannot be used.
  VerbsTransport(Environment& environment, const Library& library, const Port& port);
  ~VerbsTransport() override;

  wire::PathKind kind() const override { return wire::PathKind::verbs; }
  bool accepts(const std::string& address) const override;
  void check(const std::string& address) const override;
  std::vector<std::string> listen(const std::string& address) MOOLINK_LOCKED override;
  std::vector<std::string> announced(const std::string& advertise,
                                     const std::vector<std::string>& bound) const override;
  std::string beside(const std::vector<std::string>& bound) const override;
  void dial(const std::string& address) MOOLINK_LOCKED override;
  void stop() MOOLINK_LOCKED override;
  void abandon() noexcept override;

  // Handles the device's events; called when its descriptor is readable.
  void look_at_events() MOOLINK_LOCKED;

 private:
  // --- of the tcp connections over which queue pairs are agreed upon
  void opened(std::shared_ptr<Connection> control, const std::string& dialled)
      MOOLINK_LOCKED override;
  void closed(Connection& control, const Error& error, bool peer_dead) MOOLINK_LOCKED override;
  void dial_failed(const std::string& address, const Error& error) MOOLINK_LOCKED override;
  void turned_away(const Error& error) MOOLINK_LOCKED override;
  void cannot_accept(const Error& error) MOOLINK_LOCKED override;
  void received(Connection& control, wire::ReceivedFrame frame) MOOLINK_LOCKED override;
  std::span<std::byte> chunk_target(Connection& control, const wire::ChunkHead& head)
      MOOLINK_LOCKED override;
  void chunk_received(Connection&, const wire::ChunkHead&) MOOLINK_LOCKED override {}
  void writable(Connection&) MOOLINK_LOCKED override {}

  // --- of the connections
  void ended(wire::ConnectionId id) MOOLINK_LOCKED override;

  void refresh();
  std::shared_ptr<Device> device() MOOLINK_LOCKED;
  void watch_device() MOOLINK_LOCKED;
  void unwatch_device() MOOLINK_LOCKED;
  void completions_ready() MOOLINK_LOCKED;
  void take_event(const ibv_async_event& event) MOOLINK_LOCKED;
  void fail_all(const std::string& why) MOOLINK_LOCKED;

  Environment& environment_;
  const Library& library_;
  const Port port_;
  std::shared_ptr<Device> device_;
  io::Loop::Watch completions_watch_;
  io::Loop::Watch events_watch_;
  std::string port_down_;  // why no new connection begins; empty: the port works
  Environment of_control_;
  tcp::TcpTransport control_;
  // By the number of their tcp connection.
  std::unordered_map<wire::ConnectionId, std::shared_ptr<VerbsConnection>> connections_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // posted functions may come after
  bool stopped_ = false;
};

}  // namespace moolink::transport::verbs
