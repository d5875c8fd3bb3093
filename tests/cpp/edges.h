#pragma once

#include <sys/epoll.h>

#include "base/descriptor.h"
#include "check.h"

namespace moolink::check {

// Watches a descriptor as a loop watches a doorbell: edge-triggered.
class Edges {
 public:
  explicit Edges(int descriptor) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    CHECK_EQ(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event), 0);
  }
  // Whether there was one since the last call, or is one within the time.
  bool next(int milliseconds = 0) {
    epoll_event event;
    return ::epoll_wait(epoll_.get(), &event, 1, milliseconds) == 1;
  }

 private:
  Descriptor epoll_;
};

}  // namespace moolink::check
