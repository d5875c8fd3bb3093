#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/random.h"
#include "check.h"
#include "conformance.h"

namespace moolink::transport::conformance {
namespace {

// An emulated processor takes longer: MOOLINK_TEST_TIMEOUT is in seconds.
Duration timeout() {
  const char* given = std::getenv("MOOLINK_TEST_TIMEOUT");
  return seconds(given == nullptr ? 20 : std::max(20, std::atoi(given)));
}

}  // namespace

Side::Side(const Subject& subject, Limits limits, std::size_t max_unauthenticated)
    : environment{loop, allocator, *this, limits, Uid{1, 2}} {
  environment.max_unauthenticated = max_unauthenticated;
  transport = subject.make(environment);
}

Side::~Side() { transport->stop(); }

void Side::opened(std::shared_ptr<Connection> connection, const std::string& address) {
  if (establish_on_open) {
    connection->peers_have(features);
    connection->establish();
  }
  connections.push_back(std::move(connection));
  dialled.push_back(address);
  if (fails_to_open) throw std::bad_alloc();
}

void Side::closed(Connection&, const Error& error, bool) { closures.push_back(error); }
void Side::dial_failed(const std::string&, const Error& error) { dial_failures.push_back(error); }
void Side::turned_away(const Error& error) { refusals.push_back(error); }

void Side::received(Connection& connection, wire::ReceivedFrame frame) {
  frames.push_back(std::move(frame));
  if (close_on_frame) connection.close();
}

std::span<std::byte> Side::chunk_target(Connection&, const wire::ChunkHead& head) {
  if (discard_chunks) return {};
  return parts.at(head.seq).slice(head.offset, head.bytes).span();
}

void Side::chunk_received(Connection&, const wire::ChunkHead& head) { chunks.push_back(head); }
void Side::writable(Connection&) { ++writable_calls; }
void Side::grant_filled(Connection&, const wire::GrantPlace& place) { filled.push_back(place); }

void Side::turn(Duration wait) {
  std::unique_lock lock(engine);
  loop.turn(lock, io::now() + wait);
}

void Side::send(wire::Frame frame) {
  const std::lock_guard lock(engine);
  connection().write(std::move(frame));
  connection().flush();
}

namespace {

bool turn_until(const std::function<bool()>& condition, const std::function<void()>& turn) {
  const Time deadline = io::now() + timeout();
  while (!condition()) {
    if (io::now() > deadline) {
      CHECK(!"the condition did not come true in time");
      return false;
    }
    turn();
  }
  return true;
}

}  // namespace

bool wait_until(Side& a, Side& b, const std::function<bool()>& condition) {
  return turn_until(condition, [&] {
    a.turn(Duration::zero());
    b.turn(milliseconds(1));
  });
}

bool wait_until(Side& side, const std::function<bool()>& condition) {
  return turn_until(condition, [&] { side.turn(); });
}

bool connect(const Subject& subject, Side& a, Side& b) {
  const auto addresses = b.transport->listen(subject.listen_address);
  CHECK(!addresses.empty());
  if (addresses.empty()) return false;
  CHECK(a.transport->accepts(addresses[0]));
  a.transport->dial(addresses[0]);
  const bool met =
      wait_until(a, b, [&] { return a.connections.size() == 1 && b.connections.size() == 1; });
  CHECK(met && a.dialled[0] == addresses[0]);
  CHECK(met && b.dialled[0].empty());
  return met;
}

Buffer pattern(std::size_t size, std::uint64_t seed) {
  HeapAllocator allocator;
  MutableBuffer buffer = allocator.allocate(size);
  Random random(seed);
  for (std::size_t i = 0; i < size; i += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(buffer.data() + i, &word, std::min<std::size_t>(8, size - i));
  }
  return buffer;
}

bool same_bytes(const Buffer& a, const Buffer& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

wire::Frame message_frame(std::uint64_t seq, std::size_t bytes) {
  wire::MessageHead head;
  head.body.bytes = bytes;
  std::vector<Buffer> payload;
  if (bytes > 0) {
    // In two pieces, as a body and a part would be.
    const Buffer all = pattern(bytes, seq);
    payload = {all.slice(0, bytes / 3), all.slice(bytes / 3, bytes - bytes / 3)};
  }
  wire::Frame frame = wire::make_frame(wire::FrameType::message, head, std::move(payload));
  frame.header.seq = seq;
  frame.header.lane = static_cast<std::uint16_t>(seq % 7);
  return frame;
}

wire::Frame chunk_frame(std::uint64_t seq, std::size_t offset, const Buffer& bytes) {
  return wire::make_frame(wire::FrameType::chunk, wire::ChunkHead{seq, 0, 1, offset, bytes.size()},
                          {bytes});
}

void check_messages(const Side& side, const std::vector<std::size_t>& sizes) {
  CHECK_EQ(side.frames.size(), sizes.size());
  for (std::size_t i = 0; i < side.frames.size(); ++i) {
    const wire::ReceivedFrame& frame = side.frames[i];
    CHECK_EQ(frame.header.seq, i + 1);
    CHECK_EQ(frame.header.lane, static_cast<std::uint16_t>((i + 1) % 7));
    CHECK_EQ(wire::decode_control<wire::MessageHead>(frame).body.bytes, sizes[i]);
    CHECK(same_bytes(frame.payload(), pattern(sizes[i], i + 1)));
  }
}

namespace {

void test_frames_both_ways(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  const std::vector<std::size_t> sizes = {
      0, 1, 31, 4096, 32740, 32768, 70000, 131072, 1 << 20, 5, 3 << 20, 16 << 19, (16 << 20) - 200};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    a.send(message_frame(i + 1, sizes[i]));
    b.send(message_frame(i + 1, sizes[i]));
  }
  wait_until(a, b,
             [&] { return a.frames.size() == sizes.size() && b.frames.size() == sizes.size(); });
  check_messages(a, sizes);
  check_messages(b, sizes);
  CHECK_EQ(a.connection().queued_bytes(), 0u);
}

void test_random_sizes(const Subject& subject) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    Side a(subject);
    Side b(subject);
    if (!connect(subject, a, b)) return;
    Random random(seed);
    std::vector<std::size_t> sizes;
    for (std::uint64_t i = 0; i < 1500; ++i) {
      sizes.push_back(random.chance(1, 20) ? random.below(300000) : random.below(400));
      const std::lock_guard lock(a.engine);
      a.connection().write(message_frame(i + 1, sizes.back()));
      if (random.chance(1, 3)) a.connection().flush();
    }
    a.connection().flush();
    wait_until(a, b, [&] { return b.frames.size() == sizes.size(); });
    check_messages(b, sizes);
  }
}

void test_chunks(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  constexpr std::size_t kPart = (std::size_t{5} << 20) + 77;
  constexpr std::size_t kChunk = std::size_t{300} << 10;
  for (const std::uint64_t seq : {1, 2}) b.parts[seq] = b.allocator.allocate(kPart);
  std::vector<std::size_t> sizes;
  for (std::size_t offset = 0; offset < kPart; offset += kChunk) {
    for (const std::uint64_t seq : {1, 2}) {
      const std::size_t bytes = std::min(kChunk, kPart - offset);
      a.send(chunk_frame(seq, offset, pattern(kPart, seq).slice(offset, bytes)));
    }
    sizes.push_back(100);
    a.send(message_frame(sizes.size(), 100));
  }
  wait_until(
      a, b, [&] { return b.frames.size() == sizes.size() && b.chunks.size() == 2 * sizes.size(); });
  check_messages(b, sizes);
  CHECK(same_bytes(b.parts[1], pattern(kPart, 1)));
  CHECK(same_bytes(b.parts[2], pattern(kPart, 2)));
}

void test_discarded_chunks(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  b.discard_chunks = true;
  a.send(chunk_frame(1, 0, pattern(2 << 20, 1)));
  a.send(chunk_frame(1, 0, pattern(100, 1)));
  a.send(message_frame(1, 100));
  wait_until(a, b, [&] { return b.frames.size() == 1; });
  check_messages(b, {100});
  CHECK_EQ(b.chunks.size(), 2u);  // the handler counts them all the same
}

void test_buffers_are_held_until_written(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  std::weak_ptr<const void> held;
  {
    wire::Frame frame = message_frame(1, 6 << 20);
    held = frame.payload[0].owner();
    const std::lock_guard lock(a.engine);
    a.connection().write(std::move(frame));
  }
  CHECK(!held.expired());
  {
    const std::lock_guard lock(a.engine);
    a.connection().flush();
  }
  wait_until(a, b, [&] { return b.frames.size() == 1; });
  CHECK(held.expired());
}

void test_nobody_listens(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  std::string gone;
  {
    Side c(subject);
    gone = c.transport->listen(subject.listen_address).at(0);
  }
  a.transport->dial(gone);
  CHECK(a.dial_failures.empty());  // never from inside dial()
  wait_until(a, b, [&] { return a.dial_failures.size() == 1; });
  CHECK(a.dial_failures[0].code == ErrorCode::peer_lost);
  CHECK(a.dial_failures[0].message.find(gone) != std::string::npos);
  CHECK(a.connections.empty());
}

void test_malformed_address(const Subject& subject) {
  Side a(subject);
  CHECK_THROWS(a.transport->dial(subject.malformed_address), ErrorCode::invalid_argument);
  CHECK_THROWS(a.transport->listen(subject.malformed_address), ErrorCode::invalid_argument);
}

void test_close_sends_what_is_queued(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  const std::vector<std::size_t> sizes = {6 << 20, 10};
  for (std::size_t i = 0; i < sizes.size(); ++i) a.send(message_frame(i + 1, sizes[i]));
  b.send(message_frame(1, 1000));  // unread at a when it closes
  a.connection().close();
  a.send(message_frame(3, 10));  // dropped
  wait_until(a, b, [&] { return b.closures.size() == 1; });
  check_messages(b, sizes);
  CHECK(b.closures[0].code == ErrorCode::peer_lost);
  CHECK(a.closures.empty());     // its own doing
  b.send(message_frame(2, 10));  // to nobody: no effect
  b.turn();
  CHECK_EQ(b.closures.size(), 1u);
}

void test_closed_inside_received(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  b.close_on_frame = true;
  {
    const std::lock_guard lock(a.engine);
    for (std::uint64_t i = 1; i <= 3; ++i) a.connection().write(message_frame(i, 100));
    a.connection().flush();
  }
  wait_until(a, b, [&] { return a.closures.size() == 1; });
  CHECK_EQ(b.frames.size(), 1u);
  CHECK(b.closures.empty());
}

void test_exception_in_opened(const Subject& subject) {
  for (const bool at_dialler : {true, false}) {
    Side a(subject);
    Side b(subject);
    Side& fails = at_dialler ? a : b;
    fails.fails_to_open = true;
    const auto addresses = b.transport->listen(subject.listen_address);
    a.transport->dial(addresses.at(0));
    CHECK(wait_until(a, b, [&] { return fails.closures.size() == 1; }));
    CHECK_EQ(fails.connections.size(), 1u);
  }
}

void test_back_pressure(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  std::uint64_t sent = 0;
  while (a.connection().writable() && sent < 200) a.send(message_frame(++sent, 1 << 20));
  CHECK(sent < 200);
  CHECK_EQ(a.writable_calls, 0);
  const std::size_t full = a.connection().queued_bytes();
  wait_until(a, b, [&] { return a.writable_calls == 1; });
  CHECK(a.connection().writable());
  CHECK(a.connection().queued_bytes() < full);
  wait_until(a, b, [&] { return b.frames.size() == sent; });
  check_messages(b, std::vector<std::size_t>(sent, 1 << 20));
}

void test_strangers(const Subject& subject) {
  Side a(subject);
  Side b(subject, {}, 1);
  b.establish_on_open = false;
  b.environment.handshake_timeout = milliseconds(300);
  if (!connect(subject, a, b)) return;
  Side second(subject);
  second.transport->dial(a.dialled[0]);
  // Refused before or after it was open, as the transport's handshake has it.
  wait_until(second, b, [&] { return second.closures.size() + second.dial_failures.size() == 1; });
  CHECK_EQ(b.connections.size(), 1u);  // the cap
  wait_until(a, b, [&] { return b.closures.size() == 1 && a.closures.size() == 1; });
  CHECK(b.closures[0].code == ErrorCode::timeout);  // no greeting in time
}

void test_strangers_send_small_frames_only(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  b.establish_on_open = false;
  if (!connect(subject, a, b)) return;
  a.send(message_frame(1, 1000));
  a.send(message_frame(2, 1 << 20));
  wait_until(a, b, [&] { return b.closures.size() == 1; });
  CHECK(b.closures[0].code == ErrorCode::wire);
  check_messages(b, {1000});
}

void test_established_with_small_frames(const Subject& subject) {
  Limits limits;
  limits.max_frame = std::size_t{8} << 10;  // less than a stranger may send
  Side a(subject);
  Side b(subject, limits, 1);
  if (!connect(subject, a, b)) return;
  // No stranger any more, so that there is room for another one.
  Side second(subject);
  second.transport->dial(a.dialled[0]);
  wait_until(second, b, [&] {
    return b.connections.size() == 2 || !second.closures.empty() || !second.dial_failures.empty();
  });
  CHECK_EQ(b.connections.size(), 2u);
}

void test_frame_limit(const Subject& subject) {
  Limits limits;
  limits.max_frame = 1 << 20;
  Side a(subject);
  Side b(subject, limits);
  if (!connect(subject, a, b)) return;
  a.send(message_frame(1, 900000));
  a.send(message_frame(2, 1 << 20));
  wait_until(a, b, [&] { return b.closures.size() == 1; });
  CHECK(b.closures[0].code == ErrorCode::wire);
  check_messages(b, {900000});
}

void test_stop_is_silent(const Subject& subject) {
  Side a(subject);
  Side b(subject);
  if (!connect(subject, a, b)) return;
  a.send(message_frame(1, 100));
  b.transport->stop();
  wait_until(a, b, [&] { return a.closures.size() == 1; });
  CHECK(b.frames.empty());
  CHECK(b.closures.empty());
}

}  // namespace

void add_tests(const Subject& subject) {
  const std::pair<const char*, void (*)(const Subject&)> tests[] = {
      {"frames of every size arrive both ways, in order", test_frames_both_ways},
      {"frames of random sizes, written in batches", test_random_sizes},
      {"chunks go straight into their memory, between small frames", test_chunks},
      {"chunks that nobody wants are discarded", test_discarded_chunks},
      {"a frame's buffers are held until it is written, and no longer",
       test_buffers_are_held_until_written},
      {"dialling where nobody listens fails as refused", test_nobody_listens},
      {"a malformed address throws", test_malformed_address},
      {"close sends what is queued", test_close_sends_what_is_queued},
      {"a connection closed while it receives says no more", test_closed_inside_received},
      {"a connection that the handler fails to take is closed", test_exception_in_opened},
      {"a full queue is not writable, a drained one is again", test_back_pressure},
      {"strangers are few and must greet in time", test_strangers},
      {"strangers may send small frames only", test_strangers_send_small_frames_only},
      {"a peer whose frames are small is established, too", test_established_with_small_frames},
      {"a frame over the limit closes the connection", test_frame_limit},
      {"stop tells the handler nothing", test_stop_is_silent},
  };
  for (const auto& [name, body] : tests) {
    check::add_test(subject.name + ": " + name, [subject, run = body] { run(subject); });
  }
}

}  // namespace moolink::transport::conformance
