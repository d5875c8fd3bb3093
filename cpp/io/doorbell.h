#pragma once

#include <utility>

#include "base/descriptor.h"

namespace moolink::io {

// Wakes a process that sleeps in epoll: an eventfd that is watched edge-triggered (EPOLLIN |
// EPOLLET) and not read. Each ring is a new edge, and a ring before the watch began counts too,
// because adding a descriptor that is readable reports it. Rung only after the consumer's `asleep`
// word was seen set, so that a stream of messages to a busy peer costs no system call.
class Doorbell {
 public:
  // A new one, for others to ring. Throws Exception{error} if the system refuses.
  static Doorbell create();
  // One that a peer passed. Throws Exception{wire} unless it is a non-blocking eventfd: writing to
  // anything else could block the reactor.
  static Doorbell adopt(Descriptor descriptor);

  // Never blocks. A saturated counter (2^64 rings, or a hostile owner) drops the ring.
  void ring() const;
  // Takes the rings so far, for a consumer whose watch is level-triggered.
  void silence() const;
  int descriptor() const { return descriptor_.get(); }
  // In a forked child; it must not be rung afterwards.
  void abandon() noexcept { descriptor_.reset(); }

 private:
  explicit Doorbell(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}

  Descriptor descriptor_;
};

}  // namespace moolink::io
