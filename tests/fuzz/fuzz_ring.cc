// A ring in shared memory whose other end writes what it likes into the words and bytes, between
// any two steps of this end.

#include <array>
#include <new>

#include "io/doorbell.h"
#include "io/loop.h"
#include "target.h"
#include "transport/frame_receiver.h"
#include "transport/send_queue.h"
#include "transport/shm/ring.h"
#include "wire/crc32c.h"
#include "wire/frame.h"

namespace moolink::fuzz {
namespace {

using namespace moolink::transport;
using shm::RingWords;

constexpr std::size_t kCapacity = shm::kSmallestRingBytes;
constexpr std::size_t kWords = 4096;

class Ear final : public Handler {
 public:
  void opened(std::shared_ptr<Connection>, const std::string&) override {}
  void closed(Connection&, const Error&, bool) override {}
  void dial_failed(const std::string&, const Error&) override {}
  void received(Connection&, wire::ReceivedFrame frame) override {
    FUZZ_CHECK(frame.bytes.size() == frame.header.length);
  }
  std::span<std::byte> chunk_target(Connection&, const wire::ChunkHead& head) override {
    if (head.bytes > sizeof target) return {};
    return std::span(target).first(static_cast<std::size_t>(head.bytes));
  }
  void chunk_received(Connection&, const wire::ChunkHead&) override {}
  void writable(Connection&) override {}

  std::array<std::byte, 2048> target{};
};

// Only handed on to the handler.
class NoConnection final : public Connection {
 public:
  wire::ConnectionId id() const override { return 1; }
  wire::PathKind path() const override { return wire::PathKind::shm; }
  const wire::PathTraits& traits() const override { return traits_; }
  const std::string& peer_address() const override { return address_; }
  void write(wire::Frame) override {}
  void flush() override {}
  std::size_t queued_bytes() const override { return 0; }
  bool writable() const override { return true; }
  void establish() override {}
  void close() override {}

 private:
  wire::PathTraits traits_;
  std::string address_;
};

// The other end: it may do anything to the segment.
class Hostile {
 public:
  explicit Hostile(memory::Segment& segment)
      : words_(std::launder(reinterpret_cast<RingWords*>(segment.data()))),
        data_(segment.bytes().subspan(kWords)) {
    std::memset(segment.data(), 0, kWords);
  }

  void act(Input& input) {
    switch (input.below(8)) {
      case 0:
        return put(input, words_->tail);
      case 1:
        return put(input, words_->head);
      case 2:
        return put(input, words_->base);
      case 3:
        return put(input, words_->asleep);
      case 4:
        return put(input, words_->wake_at);
      case 5:
        return write(input.bytes());
      default:
        return write(frame(input));
    }
  }

 private:
  // A number, or one near what is there.
  static void put(Input& input, std::atomic<std::uint64_t>& word) {
    const std::uint64_t number = input.number();
    word.store(input.chance() ? word.load() + number : number);
  }
  static Bytes frame(Input& input) {
    wire::FrameHeader header;
    header.type = static_cast<wire::FrameType>(input.byte());
    header.control = static_cast<std::uint32_t>(input.number());
    Bytes bytes = input.bytes();
    header.length = static_cast<std::uint32_t>(bytes.size());
    if (input.chance()) header.length = static_cast<std::uint32_t>(input.number());
    const auto encoded = wire::encode_header(header);
    bytes.insert(bytes.begin(), encoded.begin(), encoded.end());
    return bytes;
  }
  // As an honest writer would.
  void write(const Bytes& bytes) {
    const std::uint64_t tail = words_->tail.load();
    const std::uint64_t base = words_->base.load();
    for (std::size_t i = 0; i < bytes.size(); ++i) data_[(tail - base + i) % kCapacity] = bytes[i];
    words_->tail.store(tail + bytes.size());
  }

  RingWords* words_;
  std::span<std::byte> data_;
};

}  // namespace

void run(Input input) {
  static const auto incoming = shm::make_ring(kCapacity);
  static const auto outgoing = shm::make_ring(kCapacity);
  static const io::Doorbell bell = io::make_doorbell();
  static io::Loop loop;
  CountingAllocator allocator(std::size_t{16} << 20);
  Ear ear;
  NoConnection connection;
  Environment environment{loop, allocator, ear, Limits{}, Uid{1, 1}};
  Hostile writer(*incoming);
  Hostile reader(*outgoing);
  shm::RingReader stream(incoming, bell.rung);
  FrameReceiver receiver(environment, connection);
  receiver.set_max_frame(std::size_t{64} << 10);
  shm::RingWriter ours(outgoing, bell.rung);
  SendQueue queue(1, 1);
  while (!input.empty()) {
    const std::size_t what = input.below(8);
    const bool broken = refused([&] {
      if (what < 3) writer.act(input);
      if (what == 3) reader.act(input);
      if (what == 4) receiver.receive(stream, 1 + input.byte());
      if (what == 5) receiver.receive(stream, 1 << 20);
      if (what == 6 && stream.prepare_sleep()) stream.wake();
      if (what != 7) return;
      queue.push(wire::make_frame(wire::FrameType::ping, as_buffer(input.bytes())));
      queue.write_to(ours);
      if (!queue.empty()) ours.await_room();
    });
    // A stranger's frame, at most.
    FUZZ_CHECK(allocator.held() <= std::size_t{64} << 10);
    if (broken) return;  // the connection ends
  }
}

std::vector<Bytes> seeds() {
  const Bytes payload(40, std::byte{3});
  Output honest;
  for (int i = 0; i < 3; ++i) {
    honest.byte(0).byte(6).byte(4).number(4).bytes(payload).byte(0).byte(5);
  }
  const Buffer chunk = wire::encode(wire::ChunkHead{1, 0, 1, 0, 30});
  Bytes whole(chunk.span().begin(), chunk.span().end());
  whole.resize(whole.size() + 30);
  honest.byte(0).byte(6).byte(5).number(chunk.size()).bytes(whole).byte(0).byte(4).byte(20);
  honest.byte(5).byte(6).byte(7).bytes(payload).byte(3).byte(1).number(40).byte(1);
  Output hostile;
  hostile.byte(0).byte(0).number(~std::uint64_t{0}).byte(0).byte(5);
  Output moved;
  moved.byte(0).byte(5).bytes(payload).byte(1).byte(2).number(99).byte(0).byte(5).byte(6);
  return {honest.take(), hostile.take(), moved.take()};
}

}  // namespace moolink::fuzz
