#include "transport/tcp/transport.h"

#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "base/barrier.h"
#include "base/system_error.h"
#include "transport/tcp/address.h"

namespace moolink::transport::tcp {
namespace {

constexpr Duration kConnectTimeout = seconds(5);  // of one candidate address
constexpr int kBacklog = 1024;
// Two peers of one host keep two processors busy, and the user's code needs others.
constexpr int kProcessorsForTls = 4;

// Returns the number of processors on which this process may run.
int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

Descriptor stream_socket(int family) {
  return Descriptor(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Returns an empty descriptor, with errno, on failure.
Descriptor bind_and_listen(const SocketAddress& address, bool dual_stack) {
  Descriptor socket = stream_socket(address.family());
  if (!socket) return socket;
  const int one = 1;
  // Only so that a restart does not wait for old connections; never SO_REUSEPORT, with which two
  // servers on one port would silently share its clients.
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (address.family() == AF_INET6) {
    const int only = dual_stack ? 0 : 1;
    setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  }
  if (::bind(socket.get(), address.get(), address.size) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    const int error = errno;
    socket.reset();
    errno = error;
  }
  return socket;
}

Descriptor listen_everywhere(std::uint16_t port) {
  SocketAddress any;
  auto& v6 = reinterpret_cast<sockaddr_in6&>(any.storage);
  v6.sin6_family = AF_INET6;
  v6.sin6_addr = in6addr_any;
  any.size = sizeof v6;
  any.set_port(port);
  Descriptor socket = bind_and_listen(any, true);
  if (socket || (errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL)) return socket;
  any = {};  // no IPv6 here
  auto& v4 = reinterpret_cast<sockaddr_in&>(any.storage);
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_ANY);
  any.size = sizeof v4;
  any.set_port(port);
  return bind_and_listen(any, false);
}

[[noreturn]] void listen_refused(const std::string& address, const std::string& why) {
  throw Exception(ErrorCode::error, "cannot listen on " + address + ": " + why);
}

[[noreturn]] void listen_failed(const std::string& address, int error) {
  std::string message;
  if (error == EADDRINUSE) {
    message += "the port is in use by another process; choose another one, or 0 for any";
  } else if (error == EADDRNOTAVAIL) {
    message += "this host does not have that address";
  } else {
    message += system_error_text(error);
  }
  listen_refused(address, message);
}

void look_up(const HostPort& address,
             const std::function<void(std::vector<SocketAddress>, Error)>& found) {
  std::vector<SocketAddress> addresses;
  Error error;
  guard([&] { addresses = resolve(address); }, [&](const Error& why) { error = why; });
  found(std::move(addresses), std::move(error));
}

}  // namespace

TcpTransport::TcpTransport(Environment& environment, const OpenSslFound& openssl)
    : environment_(environment),
      admission_({.waiting = environment.max_unauthenticated}),
      choice_(environment.interface),
      in_turns_(environment.tls_thread.value_or(processors() >= kProcessorsForTls)),
      alive_(std::make_shared<bool>(true)),
      results_(std::make_shared<Results>()) {
  results_->loop = &environment.loop;
  if (environment.keyring.empty()) return;
  why_no_tls_ = openssl.reason;
  if (openssl.functions == nullptr) return;
  try {
    tls_ = std::make_shared<TlsContext>(environment.keyring);
  } catch (const Exception& e) {
    why_no_tls_ = e.error().message;
  }
}

TcpTransport::~TcpTransport() {
  const std::lock_guard lock(results_->mutex);
  results_->loop = nullptr;
}

bool TcpTransport::accepts(const std::string& address) const { return is_tcp_address(address); }

std::string TcpTransport::why_not_allowed() const {
  return "this peer has a token, and finds no OpenSSL to encrypt with (" + why_no_tls_ +
         "), so that it may use loopback addresses only: install OpenSSL 3 (libssl3; `moolink "
         "doctor` says what is found), or give insecure=True, with which anybody may connect and "
         "read everything";
}

std::string TcpTransport::why_plain() const {
  if (environment_.keyring.empty()) {
    return "the one that connects has a token, and the one that listens was made with "
           "insecure=True: make both with the same token, or both without";
  }
  return "the one that connects encrypts, and the one that listens finds no OpenSSL to do so (" +
         why_no_tls_ + "): install OpenSSL 3 (libssl3) there";
}

// --- listening

std::vector<std::string> TcpTransport::listen(const std::string& address) {
  const HostPort wanted = parse_address(address);
  std::vector<std::string> bound;
  if (wanted.host.empty() && !allows({})) listen_refused(address, why_not_allowed());
  if (wanted.host.empty() && !choice_.all()) return listen_on_chosen(address, wanted.port);
  if (wanted.host.empty()) {
    Descriptor socket = listen_everywhere(wanted.port);
    if (!socket) listen_failed(address, errno);
    add_listener(std::move(socket), true, bound);
    return bound;
  }
  int error = 0;
  for (const SocketAddress& candidate : resolve(wanted)) {
    if (!allows(candidate)) listen_refused(address, why_not_allowed());
    Descriptor socket = bind_and_listen(candidate, false);
    if (!socket) {
      error = errno;
      continue;
    }
    add_listener(std::move(socket), false, bound);
    if (wanted.port == 0) break;  // a second family would get another port
  }
  if (bound.empty() && error == 0) {
    listen_refused(address,
                   "no interface of this host has an address of that family: IPv6 for [::], IPv4 "
                   "for 0.0.0.0");
  }
  if (bound.empty()) listen_failed(address, error);
  return bound;
}

// A socket for each address that MOOLINK_INTERFACE allows, all with one port.
std::vector<std::string> TcpTransport::listen_on_chosen(const std::string& address,
                                                        std::uint16_t port) {
  constexpr int kPortsTried = 16;  // of the system's choice: a free one may be taken elsewhere
  const std::vector<SocketAddress> candidates = interface_addresses(choice_);
  for (int tried = 1;; ++tried) {
    std::vector<Descriptor> sockets;
    std::uint16_t common = port;
    int error = 0;
    for (SocketAddress candidate : candidates) {
      candidate.set_port(common);
      Descriptor socket = bind_and_listen(candidate, false);
      if (!socket) {
        error = errno;
        break;
      }
      common = local_address(socket.get()).port();
      sockets.push_back(std::move(socket));
    }
    if (error == EADDRINUSE && port == 0 && tried < kPortsTried) continue;
    if (error != 0) listen_failed(address, error);
    std::vector<std::string> bound;
    for (Descriptor& socket : sockets) add_listener(std::move(socket), false, bound);
    return bound;
  }
}

// Adds the addresses at which it can be dialled to `bound`.
void TcpTransport::add_listener(Descriptor socket, bool dual_stack,
                                std::vector<std::string>& bound) {
  const SocketAddress local = local_address(socket.get());
  if (local.size == 0) throw_system_error("cannot listen: getsockname");
  if (local.is_any()) {
    for (SocketAddress& candidate : interface_addresses(choice_)) {
      const bool reached =
          candidate.family() == local.family() || (dual_stack && local.family() == AF_INET6);
      candidate.set_port(local.port());
      if (reached) bound.push_back(candidate.text());
    }
  } else {
    bound.push_back(local.text());
  }
  if (bound.empty()) return;
  listeners_.emplace_back(environment_, std::move(socket),
                          [this](Descriptor connected, const sockaddr_storage& from, socklen_t size)
                              MOOLINK_LOCKED { accepted(std::move(connected), {from, size}); });
}

void TcpTransport::accepted(Descriptor socket, const SocketAddress& remote) {
  const std::string source = source_of(remote);
  const bool this_host = is_same_host(local_address(socket.get()), remote);
  const Admission::Answer answer = admission_.admit(io::now(), source, this_host);
  if (!answer.admitted) return;  // closed
  if (answer.replaced) {
    connections_.at(*answer.replaced)->make_room();
    admission_.closed(io::now(), *answer.replaced);
  }
  adopt(std::move(socket), {}, source);
}

void TcpTransport::adopt(Descriptor socket, const std::string& dialled_address,
                         const std::string& source, std::optional<StreamOffer> offer) {
  auto connection = std::make_shared<TcpConnection>(environment_, *this, std::move(socket),
                                                    dialled_address, offer);
  connections_.emplace(connection->id(), connection);
  guard(
      [&]() MOOLINK_LOCKED {
        if (dialled_address.empty()) admission_.accepted(io::now(), connection->id(), source);
        connection->start(stream_for(*connection));
      },
      [&](const Error& error) MOOLINK_LOCKED { connection->fail(error); });
}

std::unique_ptr<ByteStream> TcpTransport::stream_for(const TcpConnection& connection) {
  if (!tls_) return std::make_unique<PlainStream>(connection.socket());
  std::optional<crypto::Key> key;
  if (!connection.dialled().empty()) {
    const auto there = keys_there_.find(connection.dialled());
    key = there == keys_there_.end() ? environment_.keyring.keys().front() : there->second;
  }
  return std::make_unique<TlsStream>(tls_, connection.socket(), std::move(key), turns(connection));
}

TlsTurns TcpTransport::turns(const TcpConnection& connection) {
  if (!in_turns_) return {};
  return {[this, of = std::weak_ptr(connections_.at(connection.id()))](std::function<void()> work) {
    if (!tls_thread_) throw Exception(ErrorCode::closed, "the transport has stopped");
    tls_thread_->submit([self = of.lock(), work = std::move(work), &loop = environment_.loop] {
      work();
      const auto tell = [&] { loop.post([self]() MOOLINK_LOCKED { self->turned(); }); };
      // If both attempts fail, the session detects the silence.
      guard(tell, [&](const Error&) { guard(tell, [](const Error&) {}); });
    });
  }};
}

void TcpTransport::not_opened(TcpConnection& connection, const HandshakeFailure& failure) {
  if (connection.is_for_stream()) return;  // its connection goes on without it
  const std::string& address = connection.dialled();
  Error error = failure.error();
  // A peer that connects has another port each time; without it, a repeated error is
  // recognised.
  const std::string which =
      address.empty() ? "a connection from " + parse_address(connection.peer_address()).host
                      : "the connection with " + connection.peer_address();
  error.message =
      which + (error.code == ErrorCode::auth ? " is refused: " : " failed: ") + error.message;
  if (address.empty()) return environment_.handler.turned_away(error);
  // The acceptor has named a key that this peer holds, too: dials once more, with that one.
  if (failure.key_there && keys_there_.emplace(address, *failure.key_there).second) {
    return dial(address);
  }
  keys_there_.erase(address);
  environment_.handler.dial_failed(address, error);
}

void TcpTransport::ended(wire::ConnectionId id) {
  admission_.closed(io::now(), id);
  connections_.erase(id);
}

// --- dialling

void TcpTransport::check(const std::string& address) const {
  const HostPort wanted = parse_address(address);
  if (wanted.host.empty() || wanted.port == 0) {
    throw Exception(ErrorCode::invalid_argument, "malformed address '" + address +
                                                     "': to connect, a host and a port are needed");
  }
}

void TcpTransport::dial(const std::string& address) {
  check(address);
  const HostPort wanted = parse_address(address);
  const DialId id = ++last_dial_;
  Dial dial;
  dial.address = address;
  dials_.emplace(id, std::move(dial));
  // The loop reports the result even when this does not block: an immediate failure must not call
  // the handler back from here.
  auto found = [this, id, results = results_, alive = std::weak_ptr<bool>(alive_)](
                   std::vector<SocketAddress> candidates, Error error) {
    const std::lock_guard lock(results->mutex);
    if (results->loop == nullptr) return;
    results->loop->post([this, id, alive, candidates = std::move(candidates),
                         error = std::move(error)]() MOOLINK_LOCKED {
      if (alive.expired()) return;
      event_of(id, [&]() MOOLINK_LOCKED { resolved(id, candidates, error); });
    });
  };
  try {
    if (is_numeric(wanted.host)) {
      look_up(wanted, found);
    } else {  // this may take many seconds
      names_.submit([wanted, found = std::move(found)] {
        guard([&] { look_up(wanted, found); }, [&](const Error& error) { found({}, error); });
      });
    }
  } catch (...) {
    dials_.erase(id);
    throw;
  }
}

void TcpTransport::dial_stream(TcpConnection& connection, const StreamOffer& offer) {
  const DialId id = ++last_dial_;
  Dial dial;
  dial.address = connection.dialled();
  dial.candidates = {remote_address(connection.socket())};
  dial.offer = offer;
  dials_.emplace(id, std::move(dial));
  event_of(id, [&]() MOOLINK_LOCKED { dial_next(id); });
}

TcpConnection* TcpTransport::find(wire::ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : found->second.get();
}

// The exception barrier of a dial.
template <class Work>
void TcpTransport::event_of(DialId id, Work&& work) {
  guard(work, [&](const Error& error) MOOLINK_LOCKED { dial_ended(id, error); });
}

// It has failed: the next address would fail, too.
void TcpTransport::dial_ended(DialId id, const Error& error) {
  const auto found = dials_.extract(id);
  if (found.empty()) return;
  Dial& dial = found.mapped();
  tell_failed(dial, error.code, error.message);
}

void TcpTransport::tell_failed(const Dial& dial, ErrorCode code, const std::string& why) {
  if (dial.offer) return;
  environment_.handler.dial_failed(
      dial.address, make_error(code, "cannot connect to " + dial.address + ": " + why));
}

void TcpTransport::resolved(DialId id, std::vector<SocketAddress> candidates, const Error& error) {
  const auto it = dials_.find(id);
  if (it == dials_.end()) return;
  it->second.candidates = std::move(candidates);
  it->second.all_refused = !error;
  it->second.failure = error.message;
  dial_next(id);
}

void TcpTransport::dial_next(DialId id) {
  Dial& dial = dials_.at(id);
  while (dial.next < dial.candidates.size()) {
    if (start_connect(id, dial, dial.candidates[dial.next++])) return;
  }
  const Dial failed = std::move(dials_.extract(id).mapped());
  tell_failed(failed, failed.all_refused ? ErrorCode::peer_lost : ErrorCode::error, failed.failure);
}

// Returns false if the attempt failed at once.
bool TcpTransport::start_connect(DialId id, Dial& dial, const SocketAddress& candidate) {
  if (!allows(candidate)) {
    dial.all_refused = false;
    dial.failure = why_not_allowed();
    return false;
  }
  dial.socket = stream_socket(candidate.family());
  int error = dial.socket ? 0 : errno;
  if (error == 0 && ::connect(dial.socket.get(), candidate.get(), candidate.size) != 0) {
    error = errno;
  }
  if (error != 0 && error != EINPROGRESS) {
    dial.all_refused &= error == ECONNREFUSED;
    dial.failure = system_error_text(error);
    dial.socket.reset();
    return false;
  }
  dial.watch = environment_.loop.watch(dial.socket.get(), EPOLLOUT,
                                       [this, id](std::uint32_t) MOOLINK_LOCKED {
                                         event_of(id, [&]() MOOLINK_LOCKED { connected(id); });
                                       });
  dial.timer = environment_.loop.timer(io::now() + kConnectTimeout, [this, id]() MOOLINK_LOCKED {
    event_of(id, [&]() MOOLINK_LOCKED { attempt_failed(id, "no answer within 5 s", false); });
  });
  return true;
}

void TcpTransport::attempt_failed(DialId id, const std::string& reason, bool refused) {
  Dial& dial = dials_.at(id);
  dial.timer.reset();
  dial.watch.reset();
  dial.socket.reset();
  dial.failure = reason;
  dial.all_refused &= refused;
  dial_next(id);
}

void TcpTransport::connected(DialId id) {
  Dial& dial = dials_.at(id);
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(dial.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  // A connect to a free port of this host may connect to itself (simultaneous open): no listener
  // there.
  if (error == 0 && local_address(dial.socket.get()) == remote_address(dial.socket.get())) {
    error = ECONNREFUSED;
  }
  if (error != 0) {
    attempt_failed(id, std::strerror(error), error == ECONNREFUSED);
    return;
  }
  const auto done = dials_.extract(id);
  dial.watch.reset();
  Descriptor socket = std::move(dial.socket);
  guard([&]() MOOLINK_LOCKED { adopt(std::move(socket), dial.address, {}, dial.offer); },
        [&](const Error& why) MOOLINK_LOCKED { tell_failed(dial, why.code, why.message); });
}

// --- the end

void TcpTransport::stop() {
  listeners_.clear();
  dials_.clear();
  names_.drop_tasks();
  tls_thread_.reset();  // waits for turns: they may hold the last bytes of closing connections
  for (auto& [id, connection] : connections_) connection->stop();
  connections_.clear();
}

void TcpTransport::abandon() noexcept {
  for (Listener& listener : listeners_) listener.abandon();
  for (auto& [id, dial] : dials_) dial.socket.reset();
  for (auto& [id, connection] : connections_) connection->abandon();
  names_.abandon();
  if (tls_thread_) tls_thread_->abandon();
}

}  // namespace moolink::transport::tcp
