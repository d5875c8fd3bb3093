#include "transport/listener.h"

#include <cerrno>
#include <utility>

#include "base/barrier.h"
#include "base/system_error.h"

namespace moolink::transport {
namespace {

constexpr Duration kPause = milliseconds(100);
// Not all at once: accepted connections must be served before others are refused.
constexpr int kAcceptedAtOnce = 64;

Error cannot_accept_error(int error_number) {
  return make_error(ErrorCode::error, "a connection waits that cannot be accepted: " +
                                          system_error_text(error_number));
}

}  // namespace

Listener::Listener(Environment& environment, Descriptor socket, Accepted accepted)
    : environment_(environment),
      socket_(std::move(socket)),
      accepted_(std::move(accepted)),
      watch_(environment.loop.watch(socket_.get(), EPOLLIN,
                                    [this](std::uint32_t) MOOLINK_LOCKED { accept_some(); })) {}

void Listener::accept_some() {
  bool more = true;
  for (int accepted = 0; more && accepted < kAcceptedAtOnce; ++accepted) {
    guard([&]() MOOLINK_LOCKED { more = accept_one(); },
          [this](const Error& error) MOOLINK_LOCKED { environment_.handler.cannot_accept(error); });
  }
}

// False: there are no more now.
bool Listener::accept_one() {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  Descriptor socket(::accept4(socket_.get(), reinterpret_cast<sockaddr*>(&from), &size,
                              SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) {
    accepted_(std::move(socket), from, size);
    return true;
  }
  const int error = errno;
  if (error == EINTR || error == ECONNABORTED) return true;
  if (error == EAGAIN || error == EWOULDBLOCK) return false;
  look_away();
  environment_.handler.cannot_accept(cannot_accept_error(error));
  return false;
}

// The socket would stay ready and spin.
void Listener::look_away() {
  pause_ = environment_.loop.timer(io::now() + kPause, [this] {
    guard([this]() MOOLINK_LOCKED { environment_.loop.change(watch_, EPOLLIN); },
          [this](const Error&) MOOLINK_LOCKED { look_away(); });
  });
  environment_.loop.change(watch_, 0);
}

}  // namespace moolink::transport
