#include "io/doorbell.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "edges.h"

namespace moolink::io {
namespace {

using check::Edges;

TEST("every ring of a doorbell is a new edge though nobody takes it") {
  const Doorbell bell = make_doorbell();
  Edges edges(bell.watched.get());
  CHECK(edges.next());  // that of the beginning
  for (int i = 0; i < 3; ++i) {
    CHECK(!edges.next());
    ring(bell.rung);
    CHECK(edges.next());
  }
}

TEST("a ring before the watch is not lost") {
  const Doorbell bell = make_doorbell();
  ring(bell.rung);
  CHECK(Edges(bell.watched.get()).next());
}

TEST("what is no Unix socket of packets is refused as a doorbell") {
  const Doorbell bell = make_doorbell();
  check_doorbell(bell.rung);
  check_doorbell(bell.watched);
  int ends[2];
  CHECK_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const Descriptor read_end(ends[0]);
  const Descriptor write_end(ends[1]);
  CHECK_THROWS(check_doorbell(write_end), ErrorCode::wire);
  CHECK_THROWS(check_doorbell(Descriptor(::eventfd(0, EFD_CLOEXEC))), ErrorCode::wire);
  CHECK_THROWS(check_doorbell(Descriptor(::socket(AF_INET, SOCK_STREAM, 0))), ErrorCode::wire);
  CHECK_THROWS(check_doorbell(Descriptor(::socket(AF_UNIX, SOCK_STREAM, 0))), ErrorCode::wire);
  CHECK_THROWS(check_doorbell(Descriptor()), ErrorCode::wire);
}

// A peer that was passed an end has the same open file, and may do with it what it likes.
TEST("a hostile holder of a doorbell stops neither who rings nor who is rung") {
  const Doorbell bell = make_doorbell();
  Edges edges(bell.watched.get());
  const Descriptor hostile(::fcntl(bell.rung.get(), F_DUPFD_CLOEXEC, 0));
  CHECK_EQ(::fcntl(hostile.get(), F_SETFL, ::fcntl(hostile.get(), F_GETFL) & ~O_NONBLOCK), 0);
  const char byte = 0;
  CHECK_EQ(::send(hostile.get(), &byte, 1, MSG_NOSIGNAL), -1);  // nothing is queued there
  const auto rings = [&] {
    while (edges.next()) {
    }
    ring(bell.rung);
    return edges.next();
  };
  CHECK(rings());
  for (int i = 0; i < 100'000; ++i) ring(hostile);
  CHECK(rings());
  CHECK_EQ(::shutdown(hostile.get(), SHUT_RDWR), 0);
  CHECK(rings());
}

// The watch of a bell whose ringer is gone keeps nobody awake.
TEST("the end of who rings is one edge") {
  Doorbell bell = make_doorbell();
  Edges edges(bell.watched.get());
  CHECK(edges.next());
  bell.rung.reset();
  CHECK(edges.next());
  CHECK(!edges.next());
}

}  // namespace
}  // namespace moolink::io
