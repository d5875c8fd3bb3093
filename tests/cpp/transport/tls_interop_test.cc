// The records of moolink's own against OpenSSL's record layer: two ends that shared a mistake would
// understand each other.

#include <sys/socket.h>

#include <array>
#include <cstring>
#include <memory>
#include <span>

#include "check.h"
#include "conformance.h"
#include "keys.h"
#include "openssl_dialler.h"
#include "transport/tcp/tls.h"

namespace moolink::transport {
namespace {

using conformance::pattern;
// OpenSSL, whole, as the dialler; a TlsStream accepts.
struct Interop {
  explicit Interop(std::uint64_t records_per_key) {
    std::array<int, 2> ends{};
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    sockets = {Descriptor(ends[0]), Descriptor(ends[1])};
    dialler = std::make_unique<OpenSslDialler>(ends[0], key_of(7));
    stream = std::make_unique<tcp::TlsStream>(
        std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(7)}), records_per_key), ends[1],
        std::nullopt);
    bool done = false;
    bool accepted = false;
    for (int turns = 0; turns < 10 && !(done && accepted); ++turns) {
      done = done || dialler->shake_hands();
      accepted = accepted || stream->shake_hands();
    }
    CHECK(done && accepted);
  }

  std::array<Descriptor, 2> sockets;
  std::unique_ptr<OpenSslDialler> dialler;
  std::unique_ptr<tcp::TlsStream> stream;
};

TEST("tls interop: OpenSSL's record layer and moolink's read each other, under changing keys") {
  for (const std::uint64_t records_per_key : {2, 1000000}) {
    Interop pair(records_per_key);
    const Buffer out = pattern(700001, 1);
    const Buffer back = pattern(600007, 2);
    std::vector<std::byte> got_out(out.size());
    std::vector<std::byte> got_back(back.size());
    std::size_t sent_out = 0;
    std::size_t sent_back = 0;
    std::size_t received_out = 0;
    std::size_t received_back = 0;
    const auto left = [](auto& buffer, std::size_t done, std::size_t most) {
      return std::min(most, buffer.size() - done);
    };
    for (std::size_t turn = 0; turn < 100000; ++turn) {
      if (received_out == out.size() && received_back == back.size()) break;
      const std::size_t piece = 1 + turn * 7919 % 40000;
      if (turn % 5 == 0) CHECK(pair.dialler->update_key(turn % 2 == 0));
      if (sent_out < out.size()) {
        sent_out += pair.dialler->write(out.span().subspan(sent_out, left(out, sent_out, piece)));
      }
      const iovec from{const_cast<std::byte*>(back.data() + sent_back),
                       left(back, sent_back, piece)};
      sent_back += pair.stream->send(std::span(&from, 1)).bytes;
      const iovec into{got_out.data() + received_out, left(got_out, received_out, piece)};
      received_out += pair.stream->receive(std::span(&into, 1), 100000).bytes;
      received_back += pair.dialler->read(
          std::span(got_back).subspan(received_back, left(got_back, received_back, piece)));
    }
    CHECK_EQ(received_out, out.size());
    CHECK_EQ(received_back, back.size());
    CHECK(std::memcmp(got_out.data(), out.data(), out.size()) == 0);
    CHECK(std::memcmp(got_back.data(), back.data(), back.size()) == 0);
  }
}

TEST("tls interop: each understands the other's end") {
  std::array<std::byte, 100> room{};
  const iovec into{room.data(), room.size()};
  Interop theirs(1000000);
  theirs.dialler->say_goodbye();
  CHECK(theirs.stream->receive(std::span(&into, 1), 1000).ended);
  Interop ours(1000000);
  CHECK(ours.stream->shut_down());
  CHECK_EQ(ours.dialler->read(room), 0u);
  CHECK(ours.dialler->heard_goodbye());
}

}  // namespace
}  // namespace moolink::transport
