#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/descriptor.h"
#include "base/thread_safety.h"
#include "io/loop.h"
#include "transport/admission.h"
#include "transport/listener.h"
#include "transport/shm/connection.h"
#include "transport/transport.h"

namespace moolink::transport::shm {

// Shared memory between processes of one host and user. docs/design/transport-shm.md.
class ShmTransport final : public Transport, public ConnectionOwner {
 public:
  explicit ShmTransport(Environment& environment);
  ~ShmTransport() override;

  wire::PathKind kind() const override { return wire::PathKind::shm; }
  bool accepts(const std::string& address) const override;
  void check(const std::string& address) const override;
  std::vector<std::string> listen(const std::string& address) MOOLINK_LOCKED override;
  void dial(const std::string& address) MOOLINK_LOCKED override;
  void stop() MOOLINK_LOCKED override;
  void abandon() noexcept override;

 private:
  std::shared_ptr<ShmConnection> add(const std::string& dialled) MOOLINK_LOCKED;
  void accepted(Descriptor socket) MOOLINK_LOCKED;
  void established(wire::ConnectionId id) MOOLINK_LOCKED override { admission_.authenticated(id); }
  void ended(wire::ConnectionId id) MOOLINK_LOCKED override;

  Environment& environment_;
  const std::string host_;
  std::list<Listener> listeners_;
  Admission admission_;  // all come from one source
  std::unordered_map<wire::ConnectionId, std::shared_ptr<ShmConnection>> connections_;
  bool stopped_ = false;
};

}  // namespace moolink::transport::shm
