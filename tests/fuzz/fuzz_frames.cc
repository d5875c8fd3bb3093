// A byte stream that a peer sends over tcp, in one piece and in arbitrary ones: both give the same
// frames, or the same error.

#include <sys/socket.h>
#include <unistd.h>

#include <map>

#include "loop.h"
#include "target.h"
#include "transport/tcp/byte_stream.h"
#include "transport/tcp/connection.h"
#include "wire/crc32c.h"
#include "wire/frame.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::transport;

constexpr std::size_t kStranger = std::size_t{64} << 10;
constexpr std::size_t kMostChunk = std::size_t{1} << 20;

// Keeps what it hears, as text.
class Ear final : public Handler, public tcp::Owner {
 public:
  void opened(std::shared_ptr<Connection>, const std::string&) override {}
  void closed(Connection&, const Error&, bool) override { heard += "end"; }
  void dial_failed(const std::string&, const Error&) override {}
  void received(Connection& connection, wire::ReceivedFrame frame) override {
    FUZZ_CHECK(frame.bytes.size() == frame.header.length);
    FUZZ_CHECK(frame.header.control <= frame.header.length);
    heard += wire::kFrameTypes[frame.header.type];
    heard.append(reinterpret_cast<const char*>(frame.bytes.data()), frame.bytes.size());
    if (frame.header.flags == 0xe5) connection.establish();
  }
  std::span<std::byte> chunk_target(Connection&, const wire::ChunkHead& head) override {
    const bool discarded = head.bytes > kMostChunk || head.seq % 4 == 3;
    chunk = Bytes(discarded ? 0 : static_cast<std::size_t>(head.bytes));
    return chunk;
  }
  void chunk_received(Connection&, const wire::ChunkHead& head) override {
    FUZZ_CHECK(chunk.empty() || chunk.size() == head.bytes);
    heard.append(reinterpret_cast<const char*>(chunk.data()), chunk.size());
  }
  void writable(Connection&) override {}
  void ended(wire::ConnectionId) override {}
  std::string why_plain() const override { return {}; }
  void dial_stream(tcp::TcpConnection&, const tcp::StreamOffer&) override {}
  tcp::TcpConnection* find(wire::ConnectionId) override { return nullptr; }
  void not_opened(tcp::TcpConnection&, const tcp::HandshakeFailure&) override {
    FUZZ_CHECK(!"a plain connection opens");
  }

  std::string heard;
  Bytes chunk;
};

// Where frames begin the checksums are put right, so that a fuzzer gets past them; a frame whose
// flags are 0xba keeps its own.
void seal(Bytes& stream) {
  for (std::size_t at = 0; at + wire::kHeaderBytes <= stream.size();) {
    std::byte* header = stream.data() + at;
    const std::uint32_t sum = wire::crc32c({header, wire::kHeaderBytes - 4});
    if (header[1] != std::byte{0xba}) std::memcpy(header + wire::kHeaderBytes - 4, &sum, 4);
    std::uint32_t length = 0;
    std::memcpy(&length, header + 4, sizeof length);
    if (length > stream.size()) return;
    at += wire::kHeaderBytes + length;
  }
}

std::string listen(const Bytes& stream, const std::vector<std::size_t>& pieces) {
  static io::Loop loop;
  CountingAllocator allocator(std::size_t{16} << 20);
  Ear ear;
  Environment environment{loop, allocator, ear, Limits{}, Uid{1, 1}};
  environment.handshake_timeout = kForEver;
  int sockets[2];
  FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
  auto connection =
      std::make_shared<tcp::TcpConnection>(environment, ear, Descriptor(sockets[0]), "");
  connection->start(std::make_unique<tcp::PlainStream>(connection->socket()));
  std::size_t sent = 0;
  for (std::size_t piece = 0; sent < stream.size(); ++piece) {
    const std::size_t wanted = piece < pieces.size() ? pieces[piece] : stream.size() - sent;
    const std::size_t size = std::min({wanted, stream.size() - sent, kStranger});
    const ssize_t written = send(sockets[1], stream.data() + sent, size, MSG_NOSIGNAL);
    if (written > 0) sent += static_cast<std::size_t>(written);
    run_all(loop);
    // Held for what has not arrived: one frame of a stranger, or of a peer.
    FUZZ_CHECK(allocator.held() <= Limits{}.max_frame + kStranger);
    if (written < 0) break;
  }
  connection->drop();
  close(sockets[1]);
  run_all(loop);
  return ear.heard;
}

void append(Output& output, const wire::Frame& frame) {
  output.rest(wire::encode_header(frame.header)).rest(frame.control.span());
  for (const Buffer& piece : frame.payload) output.rest(piece.span());
}

}  // namespace

void run(Input input) {
  std::vector<std::size_t> pieces;
  for (std::size_t count = input.below(16); count > 0; --count) {
    pieces.push_back(1 + static_cast<std::size_t>(input.number() % kStranger));
  }
  Bytes stream = input.rest();
  seal(stream);
  FUZZ_CHECK(listen(stream, pieces) == listen(stream, {}));
}

std::vector<Bytes> seeds() {
  using wire::FrameType;
  using wire::make_frame;
  wire::Hello hello;
  hello.instance = {1, 2};
  hello.name = "peer";
  hello.addresses = {"tcp://127.0.0.1:4431"};
  wire::MessageHead head;
  head.body.bytes = 5;
  head.parts.push_back({3, 64, wire::PartWhere::stream, 0});
  const Buffer body = as_buffer(Bytes(5, std::byte{7}));
  const Buffer chunk = as_buffer(Bytes(3, std::byte{8}));
  Output output;
  output.byte(2).byte(40).byte(9);
  wire::Frame first = make_frame(FrameType::hello, hello);
  first.header.flags = 0xe5;
  append(output, first);
  append(output, make_frame(FrameType::welcome, hello));
  append(output, make_frame(FrameType::message, head, {body}));
  append(output, make_frame(FrameType::chunk, wire::ChunkHead{1, 0, 1, 0, 3}, {chunk}));
  append(output, make_frame(FrameType::want, wire::Want{2, 0, 4096}));
  append(output, make_frame(FrameType::grant, wire::Grant{3, 2, 0, 4096, 1, 0}));
  append(output, make_frame(FrameType::done, wire::Done{3}));
  append(output, make_frame(FrameType::ack, wire::Ack{4, {5, 6}}));
  append(output, make_frame(FrameType::ping, wire::Ping{9}));
  append(output, make_frame(FrameType::window, wire::Window{1, 2}));
  append(output, make_frame(FrameType::close, wire::Close{}));
  const Buffer large = as_buffer(Bytes(40000, std::byte{9}));
  Output bulk;
  bulk.byte(3).byte(33).byte(200).byte(17);
  append(bulk, make_frame(FrameType::message, wire::MessageHead{}, {large}));
  // JOIN of an unknown connection: the receiver reads nothing after it.
  Output joins;
  append(joins, make_frame(FrameType::join, wire::Join{1, 0, {}}));
  append(joins, make_frame(FrameType::streams, wire::Streams{1, 4, {}}));
  return {output.take(), bulk.take(), joins.take()};
}

}  // namespace moolink::fuzz
