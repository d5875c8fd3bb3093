#include "transport/shm/transport.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "transport/shm/address.h"

namespace moolink::transport::shm {
namespace {

constexpr int kBacklog = 512;
const std::string kHere = "here";

}  // namespace

ShmTransport::ShmTransport(Environment& environment)
    : environment_(environment),
      host_(environment.host_key.hex()),
      admission_({.waiting = environment.max_unauthenticated}) {}

ShmTransport::~ShmTransport() { stop(); }

bool ShmTransport::accepts(const std::string& address) const { return is_shm_address(address); }

std::vector<std::string> ShmTransport::listen(const std::string& address) {
  Address wanted = parse_address(address);
  if (!wanted.host.empty() && wanted.host != host_) {
    throw Exception(ErrorCode::invalid_argument,
                    "cannot listen at " + address + ": it is an address of another host");
  }
  wanted.host = host_;
  if (wanted.name.empty()) wanted.name = "moolink-" + Uid::from_entropy().hex();
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const SocketAddress bound(wanted.name);
  if (!socket || ::bind(socket.get(), bound.get(), bound.size) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    const int error = errno;
    const bool taken = error == EADDRINUSE;
    throw Exception(ErrorCode::error,
                    "cannot listen at " + wanted.text() + ": " +
                        (taken ? "another socket of this host listens there; choose another "
                                 "name, or none"
                               : std::strerror(error)));
  }
  std::vector<std::string> text{wanted.text()};
  listeners_.emplace_back(environment_, std::move(socket),
                          [this](Descriptor connected, const sockaddr_storage&, socklen_t)
                              MOOLINK_LOCKED { accepted(std::move(connected)); });
  return text;
}

void ShmTransport::accepted(Descriptor socket) {
  // An excess connection is refused by closing its socket.
  const Admission::Answer answer = admission_.admit(io::now(), kHere, true);
  if (!answer.admitted) return;
  if (answer.replaced) {
    connections_.at(*answer.replaced)->make_room();
    admission_.closed(io::now(), *answer.replaced);
  }
  const auto connection = add({});
  guard(
      [&]() MOOLINK_LOCKED {
        admission_.accepted(io::now(), connection->id(), kHere);
        connection->accept(std::move(socket));
      },
      [&](const Error& error) MOOLINK_LOCKED { connection->fail(error); });
}

std::shared_ptr<ShmConnection> ShmTransport::add(const std::string& dialled) {
  auto connection = std::make_shared<ShmConnection>(environment_, *this, dialled);
  connections_.emplace(connection->id(), connection);
  return connection;
}

void ShmTransport::check(const std::string& address) const {
  if (parse_address(address).name.empty()) {
    throw Exception(ErrorCode::invalid_argument, "cannot dial " + address + ": it has no name");
  }
}

void ShmTransport::dial(const std::string& address) {
  check(address);
  const Address parsed = parse_address(address);
  const auto connection = add(address);
  if (parsed.host.empty() || parsed.host == host_) return connection->dial(parsed.name);
  // Not of this kernel and network namespace: its memory cannot be reached.
  connection->fail(make_error(ErrorCode::error,
                              "cannot reach " + address +
                                  " through shared memory: it is an address of another host or "
                                  "network namespace (this one is " +
                                  host_ + ")"));
}

void ShmTransport::ended(wire::ConnectionId id) {
  admission_.closed(io::now(), id);
  connections_.erase(id);
}

void ShmTransport::stop() {
  if (std::exchange(stopped_, true)) return;
  listeners_.clear();
  for (const auto& [id, connection] : connections_) connection->drop();
  connections_.clear();
}

void ShmTransport::abandon() noexcept {
  for (Listener& listener : listeners_) listener.abandon();
  for (const auto& [id, connection] : connections_) connection->abandon();
}

}  // namespace moolink::transport::shm
