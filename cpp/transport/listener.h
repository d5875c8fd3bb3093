#pragma once

#include <sys/socket.h>

#include <functional>

#include "base/descriptor.h"
#include "base/thread_safety.h"
#include "io/loop.h"
#include "transport/transport.h"

namespace moolink::transport {

// A listening socket: accepts the connections that wait at it, from the loop.
class Listener {
 public:
  // Takes over a new connection; `from` is the address of its other end, of `size` bytes. If it
  // throws, the connection is closed and the handler told; the peer dials again.
  using Accepted =
      std::function<void(Descriptor socket, const sockaddr_storage& from, socklen_t size)>;

  Listener(Environment& environment, Descriptor socket, Accepted accepted);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // In a forked child.
  void abandon() noexcept { socket_.reset(); }

 private:
  void accept_some() MOOLINK_LOCKED;
  bool accept_one() MOOLINK_LOCKED;
  void look_away() MOOLINK_LOCKED;

  Environment& environment_;
  Descriptor socket_;
  const Accepted accepted_;
  io::Loop::Watch watch_;
  io::Loop::Timer pause_;  // no descriptors were left: accepts again then
};

}  // namespace moolink::transport
