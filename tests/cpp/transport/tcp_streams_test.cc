// Streams of a tcp connection (tcp/streams.cc): between two transports, and with a far end that
// keeps to the protocol or breaks it.

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "conformance.h"
#include "crypto/sha256.h"
#include "keys.h"
#include "tcp_subject.h"
#include "transport/tcp/connection.h"

namespace moolink::transport {
namespace tcp_streams_test {

using conformance::chunk_frame;
using conformance::message_frame;
using conformance::pattern;
using conformance::same_bytes;
using conformance::Side;
using conformance::Subject;
using conformance::wait_until;

constexpr std::size_t kChunk = std::size_t{256} << 10;

Subject with_streams(Subject subject, StreamSettings settings = {3, Duration(0), true}) {
  subject.name += " with streams";
  subject.make = [make = subject.make, settings](Environment& environment) {
    environment.streams = settings;
    return make(environment);
  };
  return subject;
}

Subject plain() {
  Subject subject = with_keys({});
  subject.name = "tcp";
  return subject;
}

const bool kAdded = [] {
  conformance::add_tests(with_streams(plain()));
  conformance::add_tests(with_streams(with_keys({key_of(1)})));
  conformance::add_tests(with_streams(with_keys({key_of(1)}, true)));
  return true;
}();

tcp::TcpConnection& of(Side& side) { return dynamic_cast<tcp::TcpConnection&>(side.connection()); }

// Sends chunks of a part from `from` until both ends have this number of streams.
bool widen(Side& from, Side& to, std::size_t streams) {
  to.parts[1] = to.allocator.allocate(kChunk);
  const Buffer bytes = pattern(kChunk, 1);
  return wait_until(from, to, [&] {
    if (of(from).streams() == streams && of(to).streams() == streams) return true;
    while (from.connection().writable()) from.send(chunk_frame(1, 0, bytes));
    return false;
  });
}

void send_part(Side& from, Side& to, std::uint64_t seq, std::size_t chunks) {
  to.parts[seq] = to.allocator.allocate(chunks * kChunk);
  const Buffer bytes = pattern(chunks * kChunk, seq);
  for (std::size_t i = 0; i < chunks; ++i) {
    from.send(chunk_frame(seq, i * kChunk, bytes.slice(i * kChunk, kChunk)));
  }
  CHECK(wait_until(from, to, [&] {
    const auto is_of_part = [&](const wire::ChunkHead& head) { return head.seq == seq; };
    return std::ranges::count_if(to.chunks, is_of_part) == static_cast<std::ptrdiff_t>(chunks);
  }));
  CHECK(same_bytes(to.parts[seq], bytes));
}

TEST("tcp: a connection that waits for its socket gets streams, whichever side sends") {
  for (const Subject& subject : {plain(), with_keys({key_of(1)}), with_keys({key_of(1)}, true)}) {
    for (const bool dialler_sends : {true, false}) {
      Side a(with_streams(subject));
      Side b(with_streams(subject));
      if (!connect(subject, a, b)) return;
      Side& from = dialler_sends ? a : b;
      Side& to = dialler_sends ? b : a;
      CHECK(widen(from, to, 3));
      send_part(from, to, 2, 24);
      send_part(to, from, 3, 24);
      // The handler sees the connection only.
      CHECK_EQ(a.connections.size(), 1u);
      CHECK(a.closures.empty());
      for (const Error& error : b.closures) CHECK(error.code == ErrorCode::closed);
    }
  }
}

TEST("tcp: a stream that has joined has no time limit") {
  Side a(with_streams(plain()));
  Side b(with_streams(plain()));
  if (!connect(plain(), a, b)) return;
  CHECK(widen(a, b, 3));
  for (Side* side : {&a, &b}) CHECK(side->environment.loop.next_timer() == kNever);
}

TEST("tcp: the smaller limit of the two sides sets the number of streams") {
  Side a(with_streams(plain(), {2, Duration(0), true}));
  Side b(with_streams(plain(), {5, Duration(0), true}));
  if (!connect(plain(), a, b)) return;
  CHECK(widen(a, b, 2));
}

TEST("tcp: an offer to a side that allows no streams has no effect") {
  Side a(with_streams(plain(), {0, Duration(0), true}));
  Side b(with_streams(plain()));
  if (!connect(plain(), a, b)) return;
  send_part(b, a, 1, 200);
  CHECK_EQ(of(b).streams(), 0u);
  CHECK(a.closures.empty() && b.closures.empty());
}

TEST("tcp: no streams within a host, with a limit of 0, or with a peer without the feature") {
  const StreamSettings settings[] = {
      {4, Duration(0), false}, {0, Duration(0), true}, {4, Duration(0), true}};
  for (const StreamSettings& setting : settings) {
    Side a(with_streams(plain(), setting));
    Side b(with_streams(plain(), setting));
    a.features = b.features = setting.most > 0 && setting.within_host ? 0 : wire::kFeatures;
    if (!connect(plain(), a, b)) return;
    send_part(a, b, 1, 200);
    CHECK_EQ(of(a).streams(), 0u);
    CHECK_EQ(b.connections.size(), 1u);
  }
}

TEST("tcp: no streams before the connection has waited for the set time in total") {
  const StreamSettings settings{4, seconds(1000), true};
  Side a(with_streams(plain(), settings));
  Side b(with_streams(plain(), settings));
  if (!connect(plain(), a, b)) return;
  send_part(a, b, 1, 200);
  CHECK_EQ(of(a).streams(), 0u);
}

TEST("tcp: closing a connection closes its streams, at both ends") {
  for (const Subject& subject : {plain(), with_keys({key_of(1)}, true)}) {
    for (const bool by_dialler : {true, false}) {
      Side a(with_streams(subject));
      Side b(with_streams(subject));
      if (!connect(subject, a, b)) return;
      CHECK(widen(a, b, 3));
      const std::size_t known = b.closures.size();  // of sockets that became streams
      Side& closing = by_dialler ? a : b;
      Side& other = by_dialler ? b : a;
      const std::size_t before = other.closures.size();
      closing.connection().close();
      CHECK(wait_until(a, b, [&] { return other.closures.size() == before + 1; }));
      CHECK_EQ(closing.closures.size(), by_dialler ? 0u : known);
      CHECK(wait_until(a, b, [&] { return of(a).streams() + of(b).streams() == 0; }));
    }
  }
}

TEST("tcp: abandon() closes the sockets of a connection and its streams, as a forked child does") {
  Side a(with_streams(plain()));
  Side b(with_streams(plain()));
  if (!connect(plain(), a, b)) return;
  CHECK(widen(a, b, 3));
  const std::size_t before = b.closures.size();
  a.transport->abandon();  // there is no parent with copies, so each socket ends
  CHECK(wait_until(b, [&] { return b.closures.size() == before + 1; }));
  CHECK_EQ(of(b).streams(), 0u);
}

// --- with a far end that the test controls

class FarEnd {
 public:
  explicit FarEnd(const std::string& address) : FarEnd(plain_socket(address)) {}
  explicit FarEnd(Descriptor socket) : socket_(std::move(socket)) {
    const timeval limit{10, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }

  void send(const void* bytes, std::size_t size) {
    CHECK_EQ(::send(socket_.get(), bytes, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
  }
  void send(const wire::Frame& frame) {
    const auto header = wire::encode_header(frame.header);
    send(header.data(), header.size());
    send(frame.control.data(), frame.control.size());
    for (const Buffer& piece : frame.payload) send(piece.data(), piece.size());
  }
  // Turns the side until a whole frame is here.
  template <class Control>
  std::optional<Control> next(Side& side) {
    std::vector<std::byte> bytes;
    while (true) {
      if (bytes.size() >= wire::kHeaderBytes) {
        const auto header = wire::decode_header(
            std::span<const std::byte, wire::kHeaderBytes>(bytes.data(), wire::kHeaderBytes), {});
        if (bytes.size() == wire::kHeaderBytes + header.length) {
          return wire::decode<Control>(
              std::span<const std::byte>(bytes).subspan(wire::kHeaderBytes));
        }
      }
      std::byte byte{};
      const ssize_t count = ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT);
      if (count == 0) return std::nullopt;
      if (count == 1) bytes.push_back(byte);
      if (count < 0) side.turn(milliseconds(1));
    }
  }
  void close() { socket_.reset(); }
  void shut_down() { ::shutdown(socket_.get(), SHUT_WR); }

 private:
  Descriptor socket_;
};

wire::Join proven(const wire::Streams& streams, std::uint32_t index, const char* side = "dialler") {
  wire::Join join{streams.connection, index, {}};
  std::string text = std::string("moolink stream: ") + side;
  const Buffer fields = wire::encode(join);
  text.append(reinterpret_cast<const char*>(fields.data()), fields.size());
  join.proof = crypto::hmac_sha256(streams.key, crypto::bytes_of(text));
  return join;
}

wire::Frame frame_of(const wire::Join& join) {
  return wire::make_frame(wire::FrameType::join, join);
}

wire::Frame announcement(std::uint64_t seq, std::uint8_t way, std::uint64_t offset,
                         std::uint64_t bytes) {
  wire::Frame frame =
      wire::make_frame(wire::FrameType::chunk, wire::ChunkHead{seq, 0, 1, offset, bytes});
  frame.header.flags = way;
  return frame;
}

// A side, and a connection with it whose far end has asked for streams.
struct Asked {
  Asked() : side(with_streams(plain())) {
    address = side.transport->listen("127.0.0.1:0").at(0);
    main.emplace(address);
    wait_until(side, [&] { return side.connections.size() == 1; });
    main->send(wire::make_frame(wire::FrameType::streams, wire::Streams{}));
    streams = main->next<wire::Streams>(side).value_or(wire::Streams{});
    CHECK_EQ(streams.count, 3u);
  }
  // Sends this JOIN on a new socket and returns the answer; nullopt: the side refused it.
  std::optional<wire::Join> join(const wire::Join& with) {
    ends.emplace_back(address);
    ends.back().send(frame_of(with));
    return ends.back().next<wire::Join>(side);
  }

  Side side;
  std::string address;
  std::optional<FarEnd> main;
  std::vector<FarEnd> ends;
  wire::Streams streams;
};

TEST("tcp: a stream's bytes may come before or after their announcement, and after later frames") {
  Asked asked;
  const auto answer = asked.join(proven(asked.streams, 1));
  CHECK(answer && crypto::equal(answer->proof, proven(asked.streams, 1, "acceptor").proof));
  CHECK_EQ(of(asked.side).streams(), 1u);
  constexpr std::size_t kHalf = std::size_t{64} << 10;
  const Buffer bytes = pattern(2 * kHalf, 7);
  asked.side.parts[7] = asked.side.allocator.allocate(2 * kHalf);
  asked.ends[0].send(bytes.data(), kHalf + 10);  // and the beginning of the second half
  for (int i = 0; i < 5; ++i) asked.side.turn();
  CHECK(asked.side.chunks.empty());
  asked.main->send(announcement(7, 2, 0, kHalf));
  asked.main->send(announcement(7, 2, kHalf, kHalf));
  asked.main->send(message_frame(1, 100));
  CHECK(wait_until(asked.side, [&] { return asked.side.frames.size() == 1; }));
  CHECK(wait_until(asked.side, [&] { return asked.side.chunks.size() == 1; }));
  asked.ends[0].send(bytes.data() + kHalf + 10, kHalf - 10);
  CHECK(wait_until(asked.side, [&] { return asked.side.chunks.size() == 2; }));
  CHECK(same_bytes(asked.side.parts[7], bytes));
}

TEST("tcp: a stream joins with the proof for its place only, and once only") {
  const std::function<wire::Join(const wire::Streams&)> wrong[] = {
      [](wire::Streams streams) {
        streams.key[0] ^= std::byte{1};
        return proven(streams, 0);
      },
      [](wire::Streams streams) { return proven(streams, 0, "acceptor"); },
      [](wire::Streams streams) {
        wire::Join join = proven(streams, 0);
        join.index = 1;
        return join;
      },
      [](wire::Streams streams) { return proven(streams, 3); },
      [](wire::Streams streams) {
        streams.connection += 1000;
        return proven(streams, 0);
      },
      [](wire::Streams) { return wire::Join{}; }};
  Asked asked;
  for (const auto& join : wrong) {
    CHECK(!asked.join(join(asked.streams)));
    CHECK_EQ(of(asked.side).streams(), 0u);
  }
  CHECK(asked.join(proven(asked.streams, 0)).has_value());
  CHECK(!asked.join(proven(asked.streams, 0)));
  CHECK_EQ(of(asked.side).streams(), 1u);
  asked.main->send(message_frame(1, 100));  // and the connection is not affected
  CHECK(wait_until(asked.side, [&] { return asked.side.frames.size() == 1; }));
}

TEST(
    "tcp: bytes on a stream of a closing connection are not received and do not keep the loop "
    "busy") {
  Asked asked;
  CHECK(asked.join(proven(asked.streams, 0)).has_value());
  asked.side.parts[7] = asked.side.allocator.allocate(kChunk);
  std::memset(asked.side.parts[7].data(), 0, kChunk);
  asked.main->send(announcement(7, 1, 0, kChunk));
  asked.main->send(message_frame(1, 100));
  CHECK(wait_until(asked.side, [&] { return asked.side.frames.size() == 1; }));
  asked.side.connection().close();
  asked.ends[0].send("bytes", 5);
  for (int i = 0; i < 10; ++i) asked.side.turn();
  CHECK(asked.side.loop.only_woken());
  CHECK(asked.side.parts[7].span()[0] == std::byte{0});  // the memory may be another's by now
}

TEST("tcp: the loss of a stream ends its connection") {
  for (const bool in_a_chunk : {true, false}) {
    Asked asked;
    CHECK(asked.join(proven(asked.streams, 0)).has_value());
    CHECK(asked.join(proven(asked.streams, 2)).has_value());
    const std::size_t before = asked.side.closures.size();
    asked.side.parts[7] = asked.side.allocator.allocate(kChunk);
    if (in_a_chunk) asked.main->send(announcement(7, 1, 0, kChunk));
    asked.main->send(message_frame(1, 100));  // what was sent before is read
    asked.ends[0].send("bytes", 5);
    in_a_chunk ? asked.ends[0].shut_down() : asked.ends[0].close();
    // The end of an unused stream shows only when its bytes are awaited.
    if (!in_a_chunk) asked.main->send(announcement(7, 1, 0, kChunk));
    CHECK(wait_until(asked.side, [&] { return asked.side.closures.size() == before + 1; }));
    CHECK(asked.side.closures.back().code == ErrorCode::peer_lost);
    CHECK_EQ(asked.side.frames.size(), 1u);
    CHECK_EQ(of(asked.side).streams(), 0u);
  }
}

TEST("tcp: a violation of the streams' protocol ends the connection") {
  const std::function<void(Asked&)> lies[] = {
      [](Asked& asked) { asked.main->send(announcement(7, 2, 0, kChunk)); },  // not joined
      [](Asked& asked) { asked.main->send(announcement(7, 200, 0, kChunk)); },
      [](Asked& asked) { asked.main->send(announcement(7, 1, 0, 100)); },  // too small
      [](Asked& asked) {
        for (int i = 0; i < 5000; ++i) asked.main->send(announcement(7, 1, 0, kChunk));
      },
      [](Asked& asked) {
        wire::Frame frame = announcement(7, 1, 0, kChunk);
        frame.payload.push_back(pattern(100, 1));
        frame.header.length += 100;
        asked.main->send(frame);
      },
      [](Asked& asked) { asked.main->send(frame_of(proven(asked.streams, 1))); },
      [](Asked& asked) {
        asked.main->send(wire::make_frame(wire::FrameType::streams, asked.streams));
      }};
  for (const auto& lie : lies) {
    Asked asked;
    CHECK(asked.join(proven(asked.streams, 0)).has_value());
    const std::size_t before = asked.side.closures.size();
    asked.side.discard_chunks = true;
    lie(asked);
    CHECK(wait_until(asked.side, [&] { return asked.side.closures.size() == before + 1; }));
    CHECK(asked.side.closures.back().code == ErrorCode::wire);
  }
}

// A side that has dialled and has joined one stream, and a far end that has not answered the JOIN.
struct Joining {
  Joining() : side(with_streams(plain())), listener(::socket(AF_INET, SOCK_STREAM, 0)) {
    const tcp::SocketAddress any = tcp::resolve(tcp::parse_address("127.0.0.1:0")).at(0);
    CHECK_EQ(::bind(listener.get(), any.get(), any.size), 0);
    CHECK_EQ(::listen(listener.get(), 2), 0);
    side.transport->dial(tcp::local_address(listener.get()).text());
    main.emplace(accepted());
    CHECK(wait_until(side, [&] { return side.connections.size() == 1; }));
    streams = {77, 1, crypto::Digest{std::byte{3}}};
    main->send(wire::make_frame(wire::FrameType::streams, streams));
    end.emplace(accepted());
    CHECK(end->next<wire::Join>(side).has_value());
    side.parts[7] = side.allocator.allocate(kChunk);
  }
  Descriptor accepted() {
    Descriptor socket;
    CHECK(wait_until(side, [&] {
      pollfd waiting{listener.get(), POLLIN, 0};
      if (::poll(&waiting, 1, 0) != 1) return false;
      socket = Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      return true;
    }));
    return socket;
  }

  Side side;
  Descriptor listener;
  std::optional<FarEnd> main;
  std::optional<FarEnd> end;
  wire::Streams streams;
};

TEST("tcp: a chunk may be announced before the answer to its stream's JOIN") {
  Joining joining;
  joining.main->send(announcement(7, 1, 0, kChunk));
  joining.main->send(message_frame(1, 100));
  CHECK(wait_until(joining.side, [&] { return joining.side.frames.size() == 1; }));
  CHECK_EQ(of(joining.side).streams(), 0u);
  joining.end->send(frame_of(proven(joining.streams, 0, "acceptor")));
  const Buffer bytes = pattern(kChunk, 7);
  joining.end->send(bytes.data(), kChunk);
  CHECK(wait_until(joining.side, [&] { return joining.side.chunks.size() == 1; }));
  CHECK(same_bytes(joining.side.parts[7], bytes));
  CHECK_EQ(of(joining.side).streams(), 1u);
  CHECK(joining.side.closures.empty());
}

TEST("tcp: a stream that ends before it joins ends its connection only if a chunk needs it") {
  for (const bool needed : {true, false}) {
    Joining joining;
    if (needed) joining.main->send(announcement(7, 1, 0, kChunk));
    joining.main->send(message_frame(1, 100));
    CHECK(wait_until(joining.side, [&] { return joining.side.frames.size() == 1; }));
    joining.end->close();
    if (needed) {
      CHECK(wait_until(joining.side, [&] { return joining.side.closures.size() == 1; }));
      CHECK(joining.side.closures.back().code == ErrorCode::peer_lost);
      continue;
    }
    for (int i = 0; i < 10; ++i) joining.side.turn();
    joining.main->send(message_frame(2, 100));
    CHECK(wait_until(joining.side, [&] { return joining.side.frames.size() == 2; }));
    CHECK(joining.side.closures.empty());
  }
}

TEST("tcp: a connection that is not established gets no streams") {
  Side side(with_streams(plain()));
  side.establish_on_open = false;
  FarEnd stranger(side.transport->listen("127.0.0.1:0").at(0));
  wait_until(side, [&] { return side.connections.size() == 1; });
  stranger.send(wire::make_frame(wire::FrameType::streams, wire::Streams{}));
  CHECK(wait_until(side, [&] { return side.closures.size() == 1; }));
  CHECK(side.closures[0].code == ErrorCode::wire);
}

TEST("tcp: a connection goes on without streams that cannot be made") {
  Side a(with_streams(plain()));
  Side b(with_streams(plain()), {}, 1);
  if (!connect(plain(), a, b)) return;
  // The one place of unauthenticated connections is taken.
  b.establish_on_open = false;
  Side third(plain());
  third.transport->dial(a.dialled[0]);
  wait_until(third, b, [&] { return third.connections.size() == 1; });
  b.parts[1] = b.allocator.allocate(kChunk);
  b.environment.handshake_timeout = seconds(100);
  for (int i = 0; i < 100; ++i) {
    if (a.connection().writable()) a.send(chunk_frame(1, 0, pattern(kChunk, 1)));
    a.turn(Duration::zero());
    b.turn(Duration::zero());
  }
  wait_until(a, b, [&] { return a.connection().queued_bytes() == 0; });
  CHECK(a.closures.empty());
  CHECK(a.dial_failures.empty());
  send_part(a, b, 2, 10);
}

}  // namespace tcp_streams_test
}  // namespace moolink::transport
