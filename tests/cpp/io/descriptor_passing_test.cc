#include "io/descriptor_passing.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "check.h"

namespace moolink::io {
namespace {

struct Pair {
  Pair() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    a = Descriptor(ends[0]);
    b = Descriptor(ends[1]);
  }
  Descriptor a, b;
};

std::vector<std::byte> bytes_of(const char* text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text);
  return {begin, begin + std::strlen(text)};
}

TEST("descriptors arrive with their message, close-on-exec") {
  Pair pair;
  int pipe_ends[2];
  CHECK_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const Descriptor read_end(pipe_ends[0]);
  Descriptor write_end(pipe_ends[1]);
  const int passed[] = {write_end.get()};
  CHECK(send_message(pair.a.get(), bytes_of("one"), passed));
  CHECK(send_message(pair.a.get(), bytes_of("two"), {}));
  write_end.reset();
  DescriptorMessage message;
  CHECK(receive_message(pair.b.get(), message) == Received::message);
  CHECK(message.bytes == bytes_of("one"));
  CHECK_EQ(message.descriptors.size(), 1u);
  CHECK_EQ(::fcntl(message.descriptors[0].get(), F_GETFD), FD_CLOEXEC);
  CHECK_EQ(::write(message.descriptors[0].get(), "x", 1), 1);
  char byte = 0;
  CHECK_EQ(::read(read_end.get(), &byte, 1), 1);
  CHECK(receive_message(pair.b.get(), message) == Received::message);
  CHECK(message.bytes == bytes_of("two"));
  CHECK(message.descriptors.empty());
  CHECK_EQ(::read(read_end.get(), &byte, 1), 0);  // the passed copy was closed with its message
  CHECK(receive_message(pair.b.get(), message) == Received::nothing);
}

TEST("the end of the connection is told apart from nothing to read") {
  Pair pair;
  CHECK(send_message(pair.a.get(), bytes_of("last"), {}));
  pair.a.reset();
  DescriptorMessage message;
  CHECK(receive_message(pair.b.get(), message) == Received::message);
  CHECK(receive_message(pair.b.get(), message) == Received::end);
  CHECK_THROWS(send_message(pair.b.get(), bytes_of("x"), {}), ErrorCode::peer_lost);
}

TEST("a full socket says so; the rest can be sent later") {
  Pair pair;
  int sent = 0;
  while (send_message(pair.a.get(), bytes_of("message"), {})) ++sent;
  CHECK(sent > 0);
  DescriptorMessage message;
  CHECK(receive_message(pair.b.get(), message) == Received::message);
  CHECK(send_message(pair.a.get(), bytes_of("message"), {}));
}

TEST("messages above the limits are refused on both sides") {
  Pair pair;
  const std::vector<std::byte> large(kMaxPassedBytes + 1);
  CHECK_THROWS(send_message(pair.a.get(), large, {}), ErrorCode::invalid_argument);
  CHECK_THROWS(send_message(pair.a.get(), {}, {}), ErrorCode::invalid_argument);
  CHECK_EQ(::send(pair.a.get(), large.data(), large.size(), 0), static_cast<ssize_t>(large.size()));
  DescriptorMessage message;
  CHECK_THROWS(receive_message(pair.b.get(), message), ErrorCode::wire);
}

TEST("who may open no more files is told so, and not only that the peer is at fault") {
  Pair pair;
  const int passed[] = {pair.a.get()};
  CHECK(send_message(pair.a.get(), bytes_of("one"), passed));
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  DescriptorMessage message;
  std::string told;
  try {
    receive_message(pair.b.get(), message);
  } catch (const Exception& e) {
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);  // UBSan opens files to inspect the object
    told = e.what();
  }
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  CHECK(told.find("ulimit -n") != std::string::npos);
}

}  // namespace
}  // namespace moolink::io
