#pragma once

#include "base/descriptor.h"

namespace moolink::io {

// An event within this process, for a thread of it that sleeps in epoll. Watched edge-triggered it
// need not be cleared: each set() is a new edge, and one before the watch began counts too, because
// adding a readable descriptor reports it. Not for other processes: every holder of an eventfd can
// change whether it blocks (io/doorbell.h).
class Event {
 public:
  // Throws Exception{error} if the system refuses.
  Event();

  // Never blocks. A saturated counter (2^64 times) drops it.
  void set() const;
  // For a level-triggered watch.
  void clear() const;
  int descriptor() const { return descriptor_.get(); }
  // In a forked child; do not set it afterwards.
  void abandon() noexcept { descriptor_.reset(); }

 private:
  Descriptor descriptor_;
};

}  // namespace moolink::io
