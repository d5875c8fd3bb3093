// TlsStream alone: what passes between two of them, whatever the socket takes and gives.

#include <sys/socket.h>

#include <array>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "conformance.h"
#include "keys.h"
#include "transport/tcp/tls.h"

namespace moolink::transport {
namespace tls_stream_test {

using conformance::pattern;

// Two ends of a socket, with the streams on them alone.
struct Streams {
  explicit Streams(std::uint64_t records_per_key)
      : context(std::make_shared<tcp::TlsContext>(crypto::Keyring({key_of(1)}), records_per_key)) {
    std::array<int, 2> ends{};
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    sockets = {Descriptor(ends[0]), Descriptor(ends[1])};
    dialler = std::make_unique<tcp::TlsStream>(context, ends[0], key_of(1));
    acceptor = std::make_unique<tcp::TlsStream>(context, ends[1], std::nullopt);
    bool done[2] = {};
    for (int turns = 0; turns < 10 && !(done[0] && done[1]); ++turns) {
      done[0] = done[0] || dialler->shake_hands();
      done[1] = done[1] || acceptor->shake_hands();
    }
    CHECK(done[0] && done[1]);
  }

  std::shared_ptr<tcp::TlsContext> context;
  std::array<Descriptor, 2> sockets;
  std::unique_ptr<tcp::TlsStream> dialler;
  std::unique_ptr<tcp::TlsStream> acceptor;
};

TEST("tls: pieces of all sizes pass a socket that is often full, under keys that change") {
  for (const std::uint64_t records_per_key : {1, 3, 1000000}) {
    Streams streams(records_per_key);
    const Buffer all = pattern(std::size_t{3} << 20, 9);
    std::vector<std::byte> got(all.size());
    Random random(records_per_key);
    std::size_t sent = 0;
    std::size_t received = 0;
    for (int turns = 0; received < all.size() && turns < 1000000; ++turns) {
      std::vector<iovec> pieces;
      std::size_t at = sent;
      while (pieces.size() < 5 && at < all.size()) {
        const std::size_t most = random.chance(1, 4) ? 100000 : random.chance(1, 2) ? 16384 : 70;
        const std::size_t size = std::min<std::size_t>(random.below(most + 1), all.size() - at);
        pieces.push_back({const_cast<std::byte*>(all.data() + at), size});
        at += size;
      }
      sent += streams.dialler->send(pieces).bytes;
      if (random.chance(1, 3)) continue;
      const std::size_t room = std::min<std::size_t>(random.below(300000), all.size() - received);
      const std::size_t first = room == 0 ? 0 : random.below(room);
      const std::array<iovec, 2> into{iovec{got.data() + received, first},
                                      iovec{got.data() + received + first, room - first}};
      received += streams.acceptor->receive(into, random.chance(3, 4) ? room : 0).bytes;
    }
    CHECK_EQ(received, all.size());
    CHECK_EQ(std::memcmp(got.data(), all.data(), all.size()), 0);
    CHECK(!streams.dialler->unsent());
  }
}

TEST("tls: a long burst arrives whole, whatever of it the socket takes at once") {
  Streams streams(1000000);
  const Buffer all = pattern(std::size_t{32} << 20, 5);
  std::vector<std::byte> got(all.size());
  std::size_t sent = 0;
  std::size_t received = 0;
  while (received < all.size()) {
    const iovec rest{const_cast<std::byte*>(all.data()) + sent, all.size() - sent};
    const auto taken = streams.dialler->send(std::span(&rest, 1));
    sent += taken.bytes;
    CHECK_EQ(taken.full, streams.dialler->unsent());
    CHECK(taken.full || sent == all.size());
    const iovec room{got.data() + received, got.size() - received};
    received += streams.acceptor->receive(std::span(&room, 1), room.iov_len).bytes;
  }
  CHECK_EQ(std::memcmp(got.data(), all.data(), all.size()), 0);
}

TEST("tls: an end is told after all that was sent before it") {
  Streams streams(1000000);
  const Buffer all = pattern(30000, 4);
  const iovec piece{const_cast<std::byte*>(all.data()), all.size()};
  CHECK_EQ(streams.dialler->send(std::span(&piece, 1)).bytes, all.size());
  CHECK(streams.dialler->shut_down());
  std::vector<std::byte> got(2 * all.size());
  const iovec room{got.data(), got.size()};
  const auto first = streams.acceptor->receive(std::span(&room, 1), got.size());
  CHECK_EQ(first.bytes, all.size());
  CHECK(!first.ended);
  CHECK(!first.drained);
  const auto last = streams.acceptor->receive(std::span(&room, 1), got.size());
  CHECK_EQ(last.bytes, 0u);
  CHECK(last.ended);
}

TEST("tls: what was read from the socket is given without another look at it") {
  Streams streams(1000000);
  const Buffer all = pattern(60000, 3);
  const iovec piece{const_cast<std::byte*>(all.data()), all.size()};
  CHECK_EQ(streams.dialler->send(std::span(&piece, 1)).bytes, all.size());
  std::vector<std::byte> got(all.size());
  const iovec few{got.data(), 10};
  CHECK_EQ(streams.acceptor->receive(std::span(&few, 1), 2 * got.size()).bytes, 10u);
  CHECK(streams.acceptor->holds_bytes());
  streams.sockets[0].reset();  // nothing comes any more
  std::size_t received = 10;
  while (streams.acceptor->holds_bytes()) {
    const iovec rest{got.data() + received, got.size() - received};
    received += streams.acceptor->receive(std::span(&rest, 1), 0).bytes;
  }
  CHECK_EQ(received, all.size());
  CHECK_EQ(std::memcmp(got.data(), all.data(), all.size()), 0);
}

TEST("tls: receiving leaves alone what waits to be sent") {
  Streams streams(1000000);
  const Buffer all = pattern(std::size_t{4} << 20, 2);
  const iovec piece{const_cast<std::byte*>(all.data()), all.size()};
  CHECK(streams.dialler->send(std::span(&piece, 1)).full);
  const iovec words{const_cast<std::byte*>(all.data()), 100};
  CHECK_EQ(streams.acceptor->send(std::span(&words, 1)).bytes, 100u);
  ::shutdown(streams.sockets[1].get(), SHUT_RD);  // to send more would fail
  std::vector<std::byte> got(200);
  const iovec room{got.data(), got.size()};
  CHECK_EQ(streams.dialler->receive(std::span(&room, 1), got.size()).bytes, 100u);
}

}  // namespace tls_stream_test
}  // namespace moolink::transport
