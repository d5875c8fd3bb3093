// A process of this host that connects by shared memory and passes what it likes: descriptors of
// any kind, notices in any order, rings with anything in them, grants and loans anywhere.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <tuple>
#include <utility>

#include "io/descriptor_passing.h"
#include "io/doorbell.h"
#include "loop.h"
#include "memory/segment.h"
#include "target.h"
#include "transport/shm/connection.h"
#include "transport/shm/notice.h"
#include "wire/frame.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::transport;
using namespace moolink::transport::shm;

constexpr std::size_t kWords = 4096;

// In an order that the corpus relies on.
constexpr auto kNotices = std::to_array<std::pair<NoticeKind, Access>>({
    {NoticeKind::greeting, Access::read},
    {NoticeKind::pass, Access::fill},
    {NoticeKind::retire, Access::fill},
    {NoticeKind::share, Access::read},
    {NoticeKind::bye, Access::read},
    {NoticeKind::pass, Access::read},
    {NoticeKind::retire, Access::read},
    {NoticeKind::receives, Access::read},
    {NoticeKind::mapped, Access::read},
    {NoticeKind::pass, Access::block},
    {NoticeKind::retire, Access::block},
    {NoticeKind::refuses, Access::read},
});

// What a peer can pass: 0 a ring, 1 a segment, 2 one that is not sealed, 3 an empty one,
// 4 a doorbell, 5 a file, 6 a pipe's end.
Descriptor make_descriptor(std::size_t kind) {
  if (kind == 4) return std::move(io::make_doorbell().rung);
  if (kind == 5) return Descriptor(open("/dev/null", O_RDWR | O_CLOEXEC));
  if (kind == 6) {
    int ends[2];
    FUZZ_CHECK(pipe2(ends, O_CLOEXEC) == 0);
    close(ends[1]);
    return Descriptor(ends[0]);
  }
  Descriptor memory(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const off_t size = kind == 0 ? kWords + kSmallestRingBytes : kind == 3 ? 0 : 4096;
  FUZZ_CHECK(ftruncate(memory.get(), size) == 0);
  if (kind != 2) fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return memory;
}

class Victim final : public Handler, public ConnectionOwner {
 public:
  explicit Victim(io::Loop& loop) : environment{loop, allocator, *this, Limits{}, Uid{1, 1}} {
    environment.handshake_timeout = kForEver;
    connection = std::make_shared<ShmConnection>(environment, *this, "");
  }

  void ended(wire::ConnectionId) override {}
  void opened(std::shared_ptr<Connection>, const std::string&) override { is_open = true; }
  void closed(Connection&, const Error&, bool) override { over = true; }
  void dial_failed(const std::string&, const Error&) override {}
  void received(Connection&, wire::ReceivedFrame) override {}
  std::span<std::byte> chunk_target(Connection&, const wire::ChunkHead&) override { return {}; }
  void chunk_received(Connection&, const wire::ChunkHead&) override {}
  void writable(Connection&) override {}
  void shared(Connection&, const Uid&, std::vector<Descriptor> descriptors) override {
    FUZZ_CHECK(established_by_user && !descriptors.empty());
  }

  CountingAllocator allocator{std::size_t{16} << 20};
  Environment environment;
  std::shared_ptr<ShmConnection> connection;
  bool is_open = false;
  bool established_by_user = false;
  bool over = false;
};

void send_notice(Input& input, int socket) {
  Notice notice;
  std::tie(notice.kind, notice.access) = kNotices[input.below(kNotices.size())];
  notice.segment = input.number();
  if (input.byte() == 0xff) notice.magic = input.byte();
  if (input.byte() == 0xff) notice.version = input.byte();
  const Buffer encoded = wire::encode(notice);
  Bytes bytes(encoded.span().begin(), encoded.span().end());
  if (input.chance()) bend(input, bytes);
  std::vector<Descriptor> held;
  std::vector<int> passed;
  for (std::size_t count = input.below(4); count > 0; --count) {
    held.push_back(make_descriptor(input.below(7)));
    passed.push_back(held.back().get());
  }
  if (bytes.empty() || bytes.size() > io::kMaxPassedBytes) return;
  refused([&] { io::send_message(socket, bytes, passed); }, {ErrorCode::peer_lost});
}

// The ring that the victim reads, as the peer has it.
class Ring {
 public:
  void find(int socket) {
    io::DescriptorMessage message;
    if (segment_ != nullptr || io::receive_message(socket, message) != io::Received::message)
      return;
    if (message.descriptors.size() == 2) segment_ = map_ring(std::move(message.descriptors[0]));
  }
  void write(Input& input) {
    if (segment_ == nullptr) return;
    auto* words = std::launder(reinterpret_cast<RingWords*>(segment_->data()));
    const Bytes control = input.bytes();
    wire::FrameHeader header;
    header.type = static_cast<wire::FrameType>(input.byte());
    header.length = header.control = static_cast<std::uint32_t>(control.size());
    const auto encoded = wire::encode_header(header);
    std::memcpy(segment_->data() + kWords + words->tail.load(), encoded.data(), encoded.size());
    if (!control.empty()) {
      std::memcpy(segment_->data() + kWords + words->tail.load() + encoded.size(), control.data(),
                  control.size());
    }
    words->tail.fetch_add(encoded.size() + control.size());
  }

 private:
  std::shared_ptr<memory::Segment> segment_;
};

void use(Input& input, Victim& victim) {
  ShmConnection& connection = *victim.connection;
  const std::uint64_t segment = input.number();
  const std::uint64_t offset = input.number();
  const std::uint64_t size = input.number();
  switch (input.below(6)) {
    case 0:
      victim.established_by_user = true;
      return connection.establish();
    case 1:
      return connection.fill_grant({1, segment, offset, size}, as_buffer(Bytes(input.byte())));
    case 2: {
      const Buffer borrowed = connection.map_loan({1, segment, offset, size});
      std::uint8_t sum = 0;
      for (const std::byte byte : borrowed.span()) sum ^= static_cast<std::uint8_t>(byte);
      FUZZ_CHECK(borrowed.size() == size && (sum == 0 || sum != 0));
      return;
    }
    case 3:
      (void)connection.allocate_grant(1 + size % 100000);
      return;
    case 4:
      connection.write(wire::make_frame(wire::FrameType::ping, wire::Ping{size}));
      return connection.flush();
    default:
      if (input.byte() == 0) connection.close();
  }
}

}  // namespace

void run(Input input) {
  static io::Loop loop;
  int sockets[2];
  FUZZ_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
  Victim victim(loop);
  Ring ring;
  victim.connection->accept(Descriptor(sockets[0]));
  for (int steps = 0; steps < 200 && !input.empty() && !victim.over; ++steps) {
    const std::size_t what = input.below(4);
    if (what < 2) send_notice(input, sockets[1]);
    if (what == 2 && steps < 20) {
      ring.find(sockets[1]);
      ring.write(input);
    }
    if (what == 3 && victim.is_open) {
      refused([&] { use(input, victim); }, {ErrorCode::wire, ErrorCode::error});
    }
    run_all(loop);
  }
  victim.connection->drop();
  close(sockets[1]);
  run_all(loop);
}

std::vector<Bytes> seeds() {
  const auto notice = [](Output& output, NoticeKind kind, std::uint64_t segment,
                         std::initializer_list<int> descriptors, Access access = Access::read) {
    const auto found = std::ranges::find(kNotices, std::pair(kind, access));
    output.byte(0).byte(static_cast<std::uint64_t>(found - kNotices.begin()));
    output.number(segment).byte(0).byte(0).byte(0);
    output.byte(descriptors.size());
    for (const int descriptor : descriptors) output.byte(static_cast<std::uint64_t>(descriptor));
  };
  const auto use = [](Output& output, std::uint64_t segment, std::uint64_t size, int what) {
    output.byte(3).number(segment).number(8).number(size).byte(static_cast<std::uint64_t>(what));
  };
  Output output;
  notice(output, NoticeKind::greeting, 0, {0, 4});
  use(output, 0, 0, 0);
  notice(output, NoticeKind::pass, 7, {1}, Access::fill);
  notice(output, NoticeKind::pass, 8, {1});
  use(output, 7, 90, 1);
  output.byte(50);
  use(output, 8, 90, 2);
  use(output, 0, 90, 3);
  use(output, 0, 90, 4);
  notice(output, NoticeKind::share, 0, {4, 5});
  output.byte(2).bytes(Bytes(9, std::byte{1})).byte(11);
  notice(output, NoticeKind::retire, 8, {});
  notice(output, NoticeKind::retire, 7, {}, Access::fill);
  notice(output, NoticeKind::bye, 0, {});
  Output early;
  notice(early, NoticeKind::greeting, 0, {0, 4});
  for (std::uint64_t i = 0; i < 3; ++i) notice(early, NoticeKind::pass, i, {1});
  use(early, 0, 0, 0);
  Output answer;
  notice(answer, NoticeKind::greeting, 0, {0, 4});
  use(answer, 0, 0, 0);
  notice(answer, NoticeKind::mapped, 1, {});
  Output wrong;
  notice(wrong, NoticeKind::greeting, 0, {1, 6});
  return {output.take(), early.take(), answer.take(), wrong.take()};
}

}  // namespace moolink::fuzz
