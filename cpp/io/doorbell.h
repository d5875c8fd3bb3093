#pragma once

#include "base/descriptor.h"

namespace moolink::io {

// Wakes another process that sleeps in epoll: a pair of Unix sockets. A ring shuts down one of
// them, again each time; the other is watched edge-triggered (EPOLLIN | EPOLLET) and never read.
// Each ring is a new edge, and one before the watch began counts too, because adding a readable
// descriptor reports it. It rings only after it saw the consumer's `asleep` word set, so that a
// stream of messages to a busy peer costs no system call.
//
// A passed descriptor is shared with a process that may be hostile. Its actions on a pair that is
// shut down can neither keep a ring from arriving nor block the ringing thread; with an eventfd it
// could fill the counter, and remove O_NONBLOCK, which both share. (It can make rings slow, by
// watching its end very many times: 0.1 µs each.) A byte sent through a socket need not wait
// either, but wakes its reader as if the sender were about to sleep, on the same processor.
struct Doorbell {
  Descriptor rung;
  Descriptor watched;
};

// Throws Exception{error} if the system refuses.
Doorbell make_doorbell();
// Throws Exception{wire} unless the descriptor, passed by a peer, is an end of such a pair.
void check_doorbell(const Descriptor& end);

void ring(const Descriptor& rung);

}  // namespace moolink::io
