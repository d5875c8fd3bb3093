#include "io/doorbell.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "check.h"

namespace moolink::io {
namespace {

// Number of edges that an epoll set reports without waiting.
int edges(const Descriptor& epoll) {
  epoll_event events[4];
  return ::epoll_wait(epoll.get(), events, 4, 0);
}

Descriptor watch(int descriptor) {
  Descriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  CHECK_EQ(::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, descriptor, &event), 0);
  return epoll;
}

TEST("every ring of a doorbell is a new edge though nobody reads it") {
  const Doorbell bell = Doorbell::create();
  const Descriptor epoll = watch(bell.descriptor());
  CHECK_EQ(edges(epoll), 0);
  for (int i = 0; i < 3; ++i) {
    bell.ring();
    CHECK_EQ(edges(epoll), 1);
    CHECK_EQ(edges(epoll), 0);
  }
}

TEST("a ring before the watch is not lost") {
  const Doorbell bell = Doorbell::create();
  bell.ring();
  CHECK_EQ(edges(watch(bell.descriptor())), 1);
}

TEST("a ring through a passed descriptor wakes the owner") {
  const Doorbell bell = Doorbell::create();
  const Descriptor epoll = watch(bell.descriptor());
  const Doorbell passed =
      Doorbell::adopt(Descriptor(::fcntl(bell.descriptor(), F_DUPFD_CLOEXEC, 0)));
  passed.ring();
  CHECK_EQ(edges(epoll), 1);
}

TEST("what could block is refused as a doorbell") {
  int ends[2];
  CHECK_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const Descriptor read_end(ends[0]);
  CHECK_THROWS(Doorbell::adopt(Descriptor(ends[1])), ErrorCode::wire);
  CHECK_THROWS(Doorbell::adopt(Descriptor(::eventfd(0, EFD_CLOEXEC))), ErrorCode::wire);
  CHECK_THROWS(Doorbell::adopt(Descriptor()), ErrorCode::wire);
}

TEST("a saturated doorbell does not block its ringer") {
  Descriptor event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  const std::uint64_t almost = 0xfffffffffffffffeULL;
  CHECK_EQ(::write(event.get(), &almost, sizeof almost), static_cast<ssize_t>(sizeof almost));
  Doorbell::adopt(std::move(event)).ring();
}

}  // namespace
}  // namespace moolink::io
