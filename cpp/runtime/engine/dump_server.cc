#include "runtime/engine/dump_server.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

namespace moolink::runtime {
namespace {

constexpr int kBacklog = 8;
constexpr std::size_t kReaders = 8;  // at once; a new one replaces the oldest

std::string socket_name() {
  static std::atomic<unsigned> contexts{0};  // of this process
  return "moolink-dump-" + std::to_string(geteuid()) + "-" + std::to_string(getpid()) + "-" +
         std::to_string(contexts++);
}

bool of_this_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

}  // namespace

DumpServer::DumpServer(io::Loop& loop, std::function<std::string()> describe)
    : loop_(loop), describe_(std::move(describe)) {}

Error DumpServer::open() {
  const std::string name = socket_name();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);  // abstract: begins with a zero
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    return make_error(ErrorCode::error, "moolink dump cannot reach this process: the socket @" +
                                            name + ": " + std::strerror(errno));
  }
  socket_ = std::move(socket);
  // Edge-triggered: a reader that finds no free descriptor is accepted along with the next one.
  watch_ = loop_.watch(socket_.get(), EPOLLIN | EPOLLET,
                       [this](std::uint32_t) MOOLINK_LOCKED { accept_all(); });
  return {};
}

void DumpServer::close() {
  readers_.clear();
  watch_.reset();
  socket_.reset();
}

void DumpServer::abandon() noexcept {
  socket_.reset();
  for (Reader& reader : readers_) reader.socket.reset();
}

void DumpServer::accept_all() {
  while (true) {
    Descriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (!socket) return;
    if (of_this_user(socket.get())) serve(std::move(socket));
  }
}

void DumpServer::serve(Descriptor socket) {
  if (readers_.size() >= kReaders) readers_.pop_front();
  readers_.push_back({std::move(socket), describe_()});
  const auto reader = std::prev(readers_.end());
  reader->watch =
      loop_.watch(reader->socket.get(), EPOLLOUT, [this, reader](std::uint32_t) MOOLINK_LOCKED {
        if (!send_some(*reader)) readers_.erase(reader);
      });
}

bool DumpServer::send_some(Reader& reader) {
  while (reader.sent < reader.text.size()) {
    const ssize_t sent = ::send(reader.socket.get(), reader.text.data() + reader.sent,
                                reader.text.size() - reader.sent, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    reader.sent += static_cast<std::size_t>(sent);
  }
  return false;
}

}  // namespace moolink::runtime
