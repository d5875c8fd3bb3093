#pragma once

#include "base/descriptor.h"

namespace moolink::io {

// Wakes another process that sleeps in epoll: a pair of Unix sockets. To ring is to shut one of
// them down, once more each time; the other is watched edge-triggered (EPOLLIN | EPOLLET) and never
// read. Each ring is a new edge, and one before the watch began counts too, because adding a
// descriptor that is readable reports it. Rung only after the consumer's `asleep` word was seen
// set, so that a stream of messages to a busy peer costs no system call.
//
// A descriptor that was passed is shared with a process that may be hostile. What it does to a pair
// that is shut down can neither keep a ring from arriving nor stop who rings: an eventfd's counter
// it could fill, and take away O_NONBLOCK, which belongs to both. (It can make rings slow, by
// watching its end very many times: 0.1 µs each.) A byte sent through a socket need not wait
// either, but wakes its reader as if the sender were about to sleep, on the same processor.
struct Doorbell {
  Descriptor rung;
  Descriptor watched;
};

// Throws Exception{error} if the system refuses.
Doorbell make_doorbell();
// Throws Exception{wire} unless the descriptor, which a peer passed, is an end of such a pair.
void check_doorbell(const Descriptor& end);

void ring(const Descriptor& rung);

}  // namespace moolink::io
