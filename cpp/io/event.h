#pragma once

#include "base/descriptor.h"

namespace moolink::io {

// Something that happened within this process, for a thread of it that sleeps in epoll. Watched
// edge-triggered it need not be cleared: each set() is a new edge, and one before the watch began
// counts too, because adding a descriptor that is readable reports it. Not for other processes:
// whether an eventfd blocks is for every holder of it to say (io/doorbell.h).
class Event {
 public:
  // Throws Exception{error} if the system refuses.
  Event();

  // Never blocks. A saturated counter (2^64 times) drops it.
  void set() const;
  // For a watch that is level-triggered.
  void clear() const;
  int descriptor() const { return descriptor_.get(); }
  // In a forked child; it must not be set afterwards.
  void abandon() noexcept { descriptor_.reset(); }

 private:
  Descriptor descriptor_;
};

}  // namespace moolink::io
