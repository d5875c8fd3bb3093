// From a connected socket to two rings: both sides pass a ring and a doorbell, in one message each.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/system_error.h"
#include "io/doorbell.h"
#include "io/pidfd.h"
#include "transport/shm/address.h"
#include "transport/shm/connection.h"

namespace moolink::transport::shm {
namespace {

// A listener with a full backlog answers EAGAIN, and epoll does not report when it has room.
constexpr Duration kConnectAgain = milliseconds(5);

}  // namespace

void ShmConnection::accept(Descriptor socket) {
  socket_ = std::move(socket);
  guarded([this]() MOOLINK_LOCKED {
    await_greeting();
    greet();
  });
}

void ShmConnection::dial(const std::string& abstract_name) {
  guarded([&]() MOOLINK_LOCKED {
    socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket_) throw_system_error("cannot make a Unix socket");
    await_greeting();
    connect(abstract_name);
  });
}

void ShmConnection::connect(const std::string& abstract_name) {
  const SocketAddress address(abstract_name);
  if (::connect(socket_.get(), address.get(), address.size) == 0) return greet();
  if (errno == EAGAIN || errno == EINTR) {
    timer_ = environment_.loop.timer(io::now() + kConnectAgain, [this, self = shared_from_this(),
                                                                 abstract_name]() MOOLINK_LOCKED {
      if (usable()) guarded([&]() MOOLINK_LOCKED { connect(abstract_name); });
    });
    return;
  }
  const bool nobody = errno == ECONNREFUSED;
  fail(make_error(nobody ? ErrorCode::peer_lost : ErrorCode::error,
                  "cannot connect to " + dialled() + ": " +
                      (nobody ? "no process of this host listens there" : std::strerror(errno))));
}

void ShmConnection::greet() {
  const io::PeerProcess process = io::peer_process(socket_.get());
  if (dialled().empty()) peer_address_ = "process " + std::to_string(process.pid) + " of this host";
  if (process.uid != ::geteuid()) {
    return fail(make_error(ErrorCode::auth, "refused " + peer_address_ + ": it is of user " +
                                                std::to_string(process.uid) + ", this one of " +
                                                std::to_string(::geteuid())));
  }
  pidfd_ = io::open_pidfd(socket_.get());
  incoming_ = make_ring(kDefaultRingBytes);
  io::Doorbell bell = io::make_doorbell();
  bell_ = std::move(bell.watched);
  const std::array<int, 2> passed{incoming_->descriptor(), bell.rung.get()};
  send_notice(socket_.get(), {.kind = NoticeKind::greeting}, passed);
  incoming_->close_descriptor();
  socket_watch_ = environment_.loop.watch(socket_.get(), EPOLLIN,
                                          [this, self = shared_from_this()](std::uint32_t)
                                              MOOLINK_LOCKED { socket_ready(); });
}

void ShmConnection::take_greeting() {
  io::DescriptorMessage message;
  switch (io::receive_message(socket_.get(), message)) {
    case io::Received::nothing:
      return;
    case io::Received::message:
      return link(std::move(message));
    case io::Received::end:
      return fail(make_error(ErrorCode::error,
                             peer_address_ +
                                 " closed the socket before its greeting: it is of another user, "
                                 "is stopping, or has too many unauthenticated peers"));
  }
}

void ShmConnection::link(io::DescriptorMessage message) {
  if (decode_notice(message).kind != NoticeKind::greeting) {
    throw Exception(ErrorCode::wire, "its first message is not a greeting");
  }
  auto outgoing = map_ring(message.descriptors[0]);
  peer_bell_ = std::move(message.descriptors[1]);
  io::check_doorbell(peer_bell_);
  writer_.emplace(std::move(outgoing), peer_bell_);
  reader_.emplace(std::move(incoming_), peer_bell_);
  open();
  if (state_ != State::closed) watch_peer();  // the handler may have rejected it
}

}  // namespace moolink::transport::shm
