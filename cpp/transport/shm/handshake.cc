#include "transport/shm/handshake.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "io/descriptor_passing.h"
#include "io/doorbell.h"
#include "io/pidfd.h"
#include "transport/shm/address.h"
#include "transport/shm/notice.h"
#include "transport/shm/ring.h"

namespace moolink::transport::shm {
namespace {

// A listener with a full backlog answers EAGAIN, and epoll does not report when it has room.
constexpr Duration kConnectAgain = milliseconds(5);

}  // namespace

Handshake::Handshake(Environment& environment, Owner& owner, std::string address)
    : environment_(environment), owner_(owner), address_(std::move(address)) {}

Handshake::~Handshake() = default;

void Handshake::accept(Descriptor socket) {
  socket_ = std::move(socket);
  begin();
  greet();
}

void Handshake::dial(const std::string& abstract_name) {
  name_ = abstract_name;
  peer_ = address_;
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_) {
    return fail(make_error(ErrorCode::error,
                           std::string("cannot make a Unix socket: ") + std::strerror(errno)));
  }
  begin();
  connect();
}

void Handshake::begin() {
  const auto self = shared_from_this();
  deadline_ = environment_.loop.at(io::now() + environment_.handshake_timeout, [self] {
    self->fail(make_error(ErrorCode::timeout, "no greeting from " + self->peer_ +
                                                  " within the handshake's time limit"));
  });
}

void Handshake::connect() {
  const SocketAddress address(name_);
  if (::connect(socket_.get(), address.get(), address.size) == 0) return greet();
  if (errno == EAGAIN || errno == EINTR) {
    retry_ = environment_.loop.at(io::now() + kConnectAgain, [self = shared_from_this()] {
      self->guarded([&] { self->connect(); });
    });
    return;
  }
  const bool nobody = errno == ECONNREFUSED;
  fail(make_error(nobody ? ErrorCode::peer_lost : ErrorCode::error,
                  "cannot connect to " + address_ + ": " +
                      (nobody ? "no process of this host listens there" : std::strerror(errno))));
}

// The exception barrier of the handshake.
template <class Work>
void Handshake::guarded(Work&& work) noexcept {
  guard(work, [this](const Error& error) { fail(error); });
}

void Handshake::greet() {
  guarded([this] { pass_ring(); });
}

void Handshake::pass_ring() {
  const io::PeerProcess process = io::peer_process(socket_.get());
  if (peer_.empty()) peer_ = "process " + std::to_string(process.pid) + " of this host";
  if (process.uid != ::geteuid()) {
    return fail(make_error(ErrorCode::auth, "refused " + peer_ + ": it is of user " +
                                                std::to_string(process.uid) + ", this one of " +
                                                std::to_string(::geteuid())));
  }
  pidfd_ = io::open_pidfd(socket_.get());
  incoming_ = make_ring(kDefaultRingBytes);
  Notice greeting;
  greeting.kind = NoticeKind::greeting;
  io::Doorbell bell = io::make_doorbell();
  bell_ = std::move(bell.watched);
  const std::array<int, 2> passed{incoming_->descriptor(), bell.rung.get()};
  send_notice(socket_.get(), greeting, passed);
  incoming_->close_descriptor();
  watch_ = environment_.loop.watch(
      socket_.get(), EPOLLIN, [self = shared_from_this()](std::uint32_t) { self->readable(); });
}

void Handshake::readable() {
  const auto keep = shared_from_this();
  guarded([this] {
    io::DescriptorMessage message;
    switch (io::receive_message(socket_.get(), message)) {
      case io::Received::nothing:
        return;
      case io::Received::message:
        return finish(std::move(message));
      case io::Received::end:
        return fail(make_error(ErrorCode::error,
                               peer_ + " closed the socket before its greeting: it is of another "
                                       "user, is stopping, or has too many unknown peers"));
    }
  });
}

void Handshake::finish(io::DescriptorMessage message) {
  if (decode_notice(message).kind != NoticeKind::greeting) {
    throw Exception(ErrorCode::wire, peer_ + " sent something else before its greeting");
  }
  auto outgoing = map_ring(message.descriptors[0]);
  const auto keep = shared_from_this();
  io::check_doorbell(message.descriptors[1]);
  Link link{std::move(socket_),
            std::move(pidfd_),
            std::move(incoming_),
            std::move(outgoing),
            std::move(bell_),
            std::move(message.descriptors[1]),
            peer_};
  release();
  owner_.linked(*this, std::move(link));
}

void Handshake::fail(Error error) {
  const auto self = shared_from_this();
  if (std::exchange(failed_, true)) return;
  release();
  const auto post = [&](const Error& why) {
    environment_.loop.post([self, why] {
      if (!self->dropped_) self->owner_.failed(*self, why);
    });
  };
  guard([&] { post(error); }, [&](const Error&) { post(error); });
}

void Handshake::drop() {
  dropped_ = true;
  release();
}

void Handshake::release() {
  if (watch_ != 0) environment_.loop.unwatch(watch_);
  environment_.loop.cancel(deadline_);
  environment_.loop.cancel(retry_);
  watch_ = 0;
  socket_.reset();
  pidfd_.reset();
  bell_.reset();
}

}  // namespace moolink::transport::shm
