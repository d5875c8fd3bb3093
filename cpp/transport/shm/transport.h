#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/descriptor.h"
#include "io/loop.h"
#include "transport/admission.h"
#include "transport/listener.h"
#include "transport/shm/connection.h"
#include "transport/shm/handshake.h"
#include "transport/transport.h"

namespace moolink::transport::shm {

// Shared memory between processes of one host and user. docs/design/transport-shm.md.
class ShmTransport final : public Transport,
                           private Handshake::Owner,
                           private ShmConnection::Owner {
 public:
  explicit ShmTransport(Environment& environment);
  ~ShmTransport() override;

  wire::PathKind kind() const override { return wire::PathKind::shm; }
  bool accepts(const std::string& address) const override;
  void check(const std::string& address) const override;
  std::vector<std::string> listen(const std::string& address) override;
  void dial(const std::string& address) override;
  void stop() override;
  void abandon() noexcept override;

 private:
  struct Begun {
    std::shared_ptr<Handshake> handshake;
    wire::ConnectionId id = 0;  // of an accepted one
  };

  std::shared_ptr<Handshake> new_handshake(const std::string& address, wire::ConnectionId id = 0);
  void accepted(Descriptor socket);
  void make_room(wire::ConnectionId id);
  void linked(Handshake& handshake, Link link) override;
  void failed(Handshake& handshake, const Error& error) override;
  void ended(wire::ConnectionId id) override;
  void established(wire::ConnectionId id) override;

  Environment& environment_;
  const std::string host_;
  std::list<Listener> listeners_;
  Admission admission_;  // all come from one source
  std::unordered_map<Handshake*, Begun> handshakes_;
  std::unordered_map<wire::ConnectionId, std::shared_ptr<ShmConnection>> connections_;
  bool stopped_ = false;
};

}  // namespace moolink::transport::shm
