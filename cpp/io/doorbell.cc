#include "io/doorbell.h"

#include <sys/socket.h>

#include "base/system_error.h"

namespace moolink::io {
namespace {

int option(const Descriptor& socket, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  return ::getsockopt(socket.get(), SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

}  // namespace

Doorbell make_doorbell() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_system_error("cannot make a doorbell (socketpair)");
  }
  Doorbell bell{Descriptor(ends[0]), Descriptor(ends[1])};
  // Prevents sends to this end, where no process would read them.
  ::shutdown(bell.watched.get(), SHUT_RD);
  return bell;
}

void check_doorbell(const Descriptor& end) {
  if (option(end, SO_DOMAIN) != AF_UNIX || option(end, SO_TYPE) != SOCK_SEQPACKET) {
    throw Exception(ErrorCode::wire, "a peer passed a doorbell that is no Unix socket of packets");
  }
}

void ring(const Descriptor& rung) { ::shutdown(rung.get(), SHUT_WR); }

}  // namespace moolink::io
