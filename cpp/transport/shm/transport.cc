#include "transport/shm/transport.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/shm/address.h"

namespace moolink::transport::shm {
namespace {

constexpr int kBacklog = 512;
constexpr Duration kAcceptPause = milliseconds(100);
constexpr int kAcceptedAtOnce = 64;
const std::string kHere = "here";

}  // namespace

ShmTransport::ShmTransport(Environment& environment)
    : environment_(environment),
      host_(environment.host_key.hex()),
      door_({.strangers = environment.max_strangers}) {}

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
    const bool taken = errno == EADDRINUSE;
    throw Exception(ErrorCode::error,
                    "cannot listen at " + wanted.text() + ": " +
                        (taken ? "another socket of this host listens there; choose another "
                                 "name, or none"
                               : std::strerror(errno)));
  }
  listeners_.push_back({std::move(socket), 0, {}});
  watch(listeners_.back());
  return {wanted.text()};
}

void ShmTransport::watch(Listener& listener) {
  listener.watch = environment_.loop.watch(
      listener.socket.get(), EPOLLIN, [this, &listener](std::uint32_t) { accept_all(listener); });
}

void ShmTransport::accept_all(Listener& listener) {
  // Not all at once: those who have come must be heard before there is need to turn others away.
  for (int accepted = 0; accepted < kAcceptedAtOnce; ++accepted) {
    Descriptor socket(
        ::accept4(listener.socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      // A stranger too many is refused by closing its socket.
      const Door::Answer answer = door_.knock(io::now(), kHere, true);
      if (!answer.welcome) continue;
      if (answer.leaves) make_room(*answer.leaves);
      const Door::Guest guest = environment_.next_connection_id();
      door_.entered(io::now(), guest, kHere);
      new_handshake({}, guest)->accept(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    environment_.handler.cannot_accept(cannot_accept_error(errno));
    // The socket stays readable, so look away for a moment.
    environment_.loop.unwatch(listener.watch);
    listener.pause = environment_.loop.at(io::now() + kAcceptPause, [this, &listener] {
      listener.pause.reset();
      watch(listener);
    });
    return;
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
    // Not of this kernel and network namespace: there is no way to its memory.
    new_handshake(address)->refuse(make_error(
        ErrorCode::error, "cannot reach " + address +
                              " through shared memory: it is an address of another host or "
                              "network namespace (this one is " +
                              host_ + ")"));
    return;
  }
  new_handshake(address)->dial(parsed.name);
}

void ShmTransport::make_room(Door::Guest guest) {
  door_.left(io::now(), guest);
  if (const auto found = connections_.find(guest); found != connections_.end()) {
    return found->second->make_room();
  }
  const auto begun = std::find_if(handshakes_.begin(), handshakes_.end(),
                                  [&](const auto& entry) { return entry.second.guest == guest; });
  if (begun == handshakes_.end()) return;
  begun->second.handshake->drop();
  handshakes_.erase(begun);
}

std::shared_ptr<Handshake> ShmTransport::new_handshake(const std::string& address,
                                                       Door::Guest guest) {
  auto handshake =
      std::make_shared<Handshake>(environment_, static_cast<Handshake::Owner&>(*this), address);
  handshakes_.emplace(handshake.get(), Begun{handshake, guest});
  return handshake;
}

void ShmTransport::linked(Handshake& handshake, Link link) {
  const std::string dialled = handshake.dialled_address();
  door_.left(io::now(), handshakes_.at(&handshake).guest);
  handshakes_.erase(&handshake);
  auto connection = std::make_shared<ShmConnection>(
      environment_, static_cast<ShmConnection::Owner&>(*this), std::move(link));
  connections_.emplace(connection->id(), connection);
  if (dialled.empty()) door_.entered(io::now(), connection->id(), kHere);
  environment_.handler.opened(connection, dialled);
  connection->start();
}

void ShmTransport::failed(Handshake& handshake, const Error& error) {
  const std::string dialled = handshake.dialled_address();
  door_.left(io::now(), handshakes_.at(&handshake).guest);
  handshakes_.erase(&handshake);
  if (!dialled.empty()) environment_.handler.dial_failed(dialled, error);
}

void ShmTransport::ended(wire::ConnectionId id) {
  door_.left(io::now(), id);
  connections_.erase(id);
}

void ShmTransport::established(wire::ConnectionId id) { door_.proven(id); }

void ShmTransport::stop() {
  if (std::exchange(stopped_, true)) return;
  for (Listener& listener : listeners_) {
    if (listener.pause) environment_.loop.cancel(*listener.pause);
    environment_.loop.unwatch(listener.watch);
  }
  listeners_.clear();
  for (const auto& [key, begun] : handshakes_) begun.handshake->drop();
  handshakes_.clear();
  for (const auto& [id, connection] : connections_) connection->drop();
  connections_.clear();
}

void ShmTransport::abandon() noexcept {
  for (Listener& listener : listeners_) listener.socket.reset();
  for (const auto& [key, begun] : handshakes_) begun.handshake->abandon();
  for (const auto& [id, connection] : connections_) connection->abandon();
}

}  // namespace moolink::transport::shm
