#pragma once

#include <sys/types.h>

#include "base/descriptor.h"

namespace moolink::io {

// The process at the other end of a connected Unix socket, as reported by the kernel.
struct PeerProcess {
  pid_t pid;  // 0: in a pid namespace that is not visible from here
  uid_t uid;
};

// Throws Exception{error} if the socket does not report it (it is no connected Unix socket).
PeerProcess peer_process(int socket);

// A descriptor that becomes readable when the peer's process has ended: the one proof of death that
// needs no time-out. Empty if the kernel cannot provide it (old kernel, foreign pid namespace, or
// the process is gone already): then only the end of file of the socket is known, which is no
// proof, because a forked child may hold the socket.
Descriptor open_pidfd(int socket);

}  // namespace moolink::io
