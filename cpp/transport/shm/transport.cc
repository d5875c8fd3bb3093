#include "transport/shm/transport.h"

#include <sys/socket.h>

#include <algorithm>
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
      admission_({.waiting = environment.max_strangers}) {}

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
                          [this](Descriptor connected, const sockaddr_storage&, socklen_t) {
                            accepted(std::move(connected));
                          });
  return text;
}

void ShmTransport::accepted(Descriptor socket) {
  // An excess connection is refused by closing its socket.
  const Admission::Answer answer = admission_.admit(io::now(), kHere, true);
  if (!answer.admitted) return;
  if (answer.replaced) make_room(*answer.replaced);
  const wire::ConnectionId id = environment_.next_connection_id();
  admission_.accepted(io::now(), id, kHere);
  try {
    const auto handshake = new_handshake({}, id);
    guard([&] { handshake->accept(std::move(socket)); },
          [&](const Error& error) { handshake->refuse(error); });
  } catch (...) {
    admission_.closed(io::now(), id);
    throw;
  }
}

void ShmTransport::check(const std::string& address) const {
  if (parse_address(address).name.empty()) {
    throw Exception(ErrorCode::invalid_argument, "cannot dial " + address + ": it has no name");
  }
}

void ShmTransport::dial(const std::string& address) {
  check(address);
  const Address parsed = parse_address(address);
  if (!parsed.host.empty() && parsed.host != host_) {
    // Not of this kernel and network namespace: its memory cannot be reached.
    new_handshake(address)->refuse(make_error(
        ErrorCode::error, "cannot reach " + address +
                              " through shared memory: it is an address of another host or "
                              "network namespace (this one is " +
                              host_ + ")"));
    return;
  }
  const auto handshake = new_handshake(address);
  guard([&] { handshake->dial(parsed.name); },
        [&](const Error& error) { handshake->refuse(error); });
}

void ShmTransport::make_room(wire::ConnectionId id) {
  admission_.closed(io::now(), id);
  if (const auto found = connections_.find(id); found != connections_.end()) {
    return found->second->make_room();
  }
  const auto begun = std::find_if(handshakes_.begin(), handshakes_.end(),
                                  [&](const auto& entry) { return entry.second.id == id; });
  if (begun == handshakes_.end()) return;
  begun->second.handshake->drop();
  handshakes_.erase(begun);
}

std::shared_ptr<Handshake> ShmTransport::new_handshake(const std::string& address,
                                                       wire::ConnectionId id) {
  auto handshake =
      std::make_shared<Handshake>(environment_, static_cast<Handshake::Owner&>(*this), address);
  handshakes_.emplace(handshake.get(), Begun{handshake, id});
  return handshake;
}

void ShmTransport::linked(Handshake& handshake, Link link) {
  const std::string dialled = handshake.dialled_address();
  auto connection = std::make_shared<ShmConnection>(
      environment_, static_cast<ShmConnection::Owner&>(*this), std::move(link));
  connections_.emplace(connection->id(), connection);
  // From here on a failure ends the connection; before, the handshake.
  admission_.closed(io::now(), handshakes_.at(&handshake).id);
  handshakes_.erase(&handshake);
  guard(
      [&] {
        if (dialled.empty()) admission_.accepted(io::now(), connection->id(), kHere);
        environment_.handler.opened(connection, dialled);
        connection->start();
      },
      [&](const Error& error) {
        connection->fail(error, false);
        // The handler may not know it yet.
        if (!dialled.empty()) environment_.handler.dial_failed(dialled, error);
      });
}

void ShmTransport::failed(Handshake& handshake, const Error& error) {
  const std::string dialled = handshake.dialled_address();
  admission_.closed(io::now(), handshakes_.at(&handshake).id);
  handshakes_.erase(&handshake);
  if (!dialled.empty()) environment_.handler.dial_failed(dialled, error);
}

void ShmTransport::ended(wire::ConnectionId id) {
  admission_.closed(io::now(), id);
  connections_.erase(id);
}

void ShmTransport::established(wire::ConnectionId id) { admission_.authenticated(id); }

void ShmTransport::stop() {
  if (std::exchange(stopped_, true)) return;
  listeners_.clear();
  for (const auto& [key, begun] : handshakes_) begun.handshake->drop();
  handshakes_.clear();
  for (const auto& [id, connection] : connections_) connection->drop();
  connections_.clear();
}

void ShmTransport::abandon() noexcept {
  for (Listener& listener : listeners_) listener.abandon();
  for (const auto& [key, begun] : handshakes_) begun.handshake->abandon();
  for (const auto& [id, connection] : connections_) connection->abandon();
}

}  // namespace moolink::transport::shm
