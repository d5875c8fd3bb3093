#include "io/pidfd.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "base/uid.h"
#include "check.h"

namespace moolink::io {
namespace {

bool readable(const Descriptor& descriptor, int timeout_ms) {
  pollfd entry{descriptor.get(), POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

struct Address {
  sockaddr_un bytes{};
  socklen_t size = 0;

  Address() {
    const std::string name = "moolink-test-" + Uid::from_entropy().hex();
    bytes.sun_family = AF_UNIX;
    std::memcpy(bytes.sun_path + 1, name.data(), name.size());
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

TEST("the kernel names the process at the other end") {
  int ends[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const Descriptor a(ends[0]), b(ends[1]);
  CHECK_EQ(peer_process(a.get()).pid, ::getpid());
  CHECK_EQ(peer_process(a.get()).uid, ::geteuid());
  CHECK_THROWS(peer_process(-1), ErrorCode::error);
}

TEST("a pidfd tells the death of the peer even while another process holds its socket") {
  const Address address;
  const Descriptor listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  CHECK_EQ(::bind(listener.get(), address.get(), address.size), 0);
  CHECK_EQ(::listen(listener.get(), 1), 0);
  int release[2];  // the holder lives until this pipe is closed
  CHECK_EQ(::pipe2(release, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(release[1]);
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (::connect(socket, address.get(), address.size) != 0) ::_exit(1);
    char byte;
    if (::fork() == 0) {  // the holder of the socket
      [[maybe_unused]] const ssize_t n = ::read(release[0], &byte, 1);
      ::_exit(0);
    }
    [[maybe_unused]] const ssize_t n = ::recv(socket, &byte, 1, 0);  // until told to die
    ::_exit(0);
  }
  ::close(release[0]);
  const Descriptor holder_lives(release[1]);
  const Descriptor accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK_EQ(peer_process(accepted.get()).pid, child);
  const Descriptor pidfd = open_pidfd(accepted.get());
  CHECK(static_cast<bool>(pidfd));
  if (!pidfd) return;
  CHECK(!readable(pidfd, 0));
  CHECK_EQ(::send(accepted.get(), "x", 1, MSG_NOSIGNAL), 1);
  CHECK(readable(pidfd, 10000));
  char byte;
  CHECK_EQ(::recv(accepted.get(), &byte, 1, MSG_DONTWAIT), -1);  // no end of file
  CHECK_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace moolink::io
