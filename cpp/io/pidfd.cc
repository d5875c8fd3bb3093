#include "io/pidfd.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/system_error.h"

// Both are newer than the headers of some supported systems.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace moolink::io {

PeerProcess peer_process(int socket) {
  struct ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    throw_system_error("cannot ask a socket for its peer's process");
  }
  return {credentials.pid, credentials.uid};
}

Descriptor open_pidfd(int socket) {
  // Linux 6.5: names the very process that connected, even if its number was reused since.
  int descriptor = -1;
  socklen_t size = sizeof descriptor;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &descriptor, &size) == 0 && descriptor >= 0) {
    return Descriptor(descriptor);
  }
  const pid_t pid = peer_process(socket).pid;
  if (pid <= 0) return {};
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace moolink::io
