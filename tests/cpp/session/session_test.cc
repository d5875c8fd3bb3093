#include "session/session.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "check.h"
#include "session/pair.h"

namespace moolink::session::testing {

constexpr std::size_t kMostParts = Limits{}.max_parts;

TEST("a message and its reply cost two frames") {
  Pair pair;
  pair.connect();
  CHECK(pair.a.session.ready() && pair.b.session.ready());
  CHECK(pair.send(pair.a, 100, 7));
  CHECK_EQ(pair.exchange(), 1);
  CHECK_EQ(pair.b.delivered.size(), 1u);
  CHECK(pair.send(pair.b, 100, 8));
  CHECK_EQ(pair.exchange(), 1);
  CHECK_EQ(pair.a.acked.size(), 1u);  // the reply carried the acknowledgement
  pair.now += milliseconds(25);
  pair.a.session.tick(pair.now);
  CHECK_EQ(pair.exchange(), 1);  // nothing followed: an ACK of its own
  CHECK_EQ(pair.b.acked.size(), 1u);
  CHECK(pair.a.session.flushed() && pair.b.session.flushed());
}

TEST("an ACK is due after sixteen messages") {
  Pair pair;
  pair.connect();
  for (std::uint64_t i = 1; i <= 16; ++i) CHECK(pair.send(pair.a, 10, i));
  pair.exchange();
  CHECK_EQ(pair.a.acked.size(), 16u);
}

TEST("large parts arrive in chunks between small messages") {
  Pair pair;
  pair.connect();
  OutgoingMessage large;
  large.kind = 1;
  large.payload.body = bytes_of(10);
  large.payload.parts = {bytes_of(std::size_t{5} << 20), bytes_of(3)};
  CHECK(pair.a.session.send(pair.now, OutgoingMessage(large)));
  CHECK(pair.send(pair.a, 100, 2));
  pair.a.collect();
  // Only two chunks are under way when the small message is written.
  CHECK_EQ(pair.a.out.size(), 4u);
  pair.exchange();
  CHECK_EQ(pair.b.delivered.size(), 2u);
  CHECK_EQ(pair.b.delivered[0].payload.body.size(), 100u);
  const wire::Payload& payload = pair.b.delivered[1].payload;
  CHECK_EQ(payload.parts.size(), 2u);
  CHECK_EQ(
      std::memcmp(payload.parts[0].data(), large.payload.parts[0].data(), payload.parts[0].size()),
      0);
}

TEST("all parts of the longest message arrive, most of them outside its frame") {
  Pair pair;
  pair.connect();
  const Buffer bytes = bytes_of(2 * kMostParts);
  OutgoingMessage message;
  message.kind = 1;
  message.payload.body = bytes_of(10);
  for (std::size_t i = 0; i < kMostParts; ++i) message.payload.parts.push_back(bytes.slice(i, 100));
  CHECK(pair.a.session.send(pair.now, OutgoingMessage(message)));
  pair.exchange();
  CHECK_EQ(pair.b.delivered.size(), 1u);
  const std::vector<Buffer>& parts = pair.b.delivered[0].payload.parts;
  CHECK_EQ(parts.size(), kMostParts);
  for (std::size_t i = 0; i < kMostParts; ++i) {
    CHECK(std::ranges::equal(parts[i].span(), message.payload.parts[i].span()));
  }
}

// The path has grants for parts of 100,000 bytes, and none of the peer's memory is given.
TEST("parts that stream pass those that wait for a grant; a part without one streams, in order") {
  Pair pair;
  wire::PathTraits traits;
  traits.grants = true;
  traits.grant_bytes = 100'000;
  pair.connect(traits);
  OutgoingMessage message;
  message.kind = 1;
  for (int i = 0; i < 10; ++i) message.payload.parts.push_back(bytes_of(100'000));
  message.payload.parts.push_back(bytes_of(50'000));
  CHECK(pair.a.session.send(pair.now, std::move(message)));
  const auto written = [&] {
    pair.a.collect();
    std::vector<std::pair<wire::FrameType, std::uint32_t>> parts;
    for (const wire::Frame& frame : pair.a.out) {
      if (frame.header.type == wire::FrameType::want) {
        const auto want = wire::decode_control<wire::Want>(as_received(frame));
        parts.emplace_back(frame.header.type, want.part);
      } else if (frame.header.type == wire::FrameType::chunk) {
        const auto head = wire::decode<wire::ChunkHead>(frame.control.span());
        parts.emplace_back(frame.header.type, head.part);
      }
    }
    pair.a.out.clear();
    return parts;
  };
  using wire::FrameType;
  std::vector<std::pair<FrameType, std::uint32_t>> expected;
  for (std::uint32_t part = 0; part < 8; ++part) expected.emplace_back(FrameType::want, part);
  expected.emplace_back(FrameType::chunk, 10);
  CHECK(written() == expected);
  const auto refuse = [&](std::uint32_t part) {
    const wire::Frame frame =
        wire::make_frame(FrameType::grant, wire::Grant{.seq = 1, .part = part});
    pair.a.session.received(pair.now, 1, as_received(frame));
  };
  refuse(5);
  refuse(3);
  expected = {{FrameType::chunk, 5}, {FrameType::want, 8}, {FrameType::want, 9}};
  CHECK(written() == expected);
  pair.a.session.writable(pair.now, 1);
  expected = {{FrameType::chunk, 3}};
  CHECK(written() == expected);
}

TEST("a full window refuses, and tells when it opens") {
  Limits limits;
  limits.send_window_messages = 2;
  Pair pair(limits);
  pair.connect();
  CHECK(pair.send(pair.a, 10, 1) && pair.send(pair.a, 10, 2));
  CHECK(!pair.send(pair.a, 10, 3));
  pair.exchange();
  pair.now += milliseconds(25);
  pair.b.session.tick(pair.now);
  pair.exchange();
  CHECK_EQ(pair.a.opened, 1);
  CHECK(pair.send(pair.a, 10, 3));
}

// Parts without a byte cost their receiver memory, too.
Limits a_megabyte() {
  Limits limits;
  limits.send_window_bytes = std::size_t{1} << 20;
  return limits;
}

TEST("empty parts fill the window, and all that it takes arrive") {
  Pair pair(a_megabyte());
  pair.connect();
  const auto send = [&pair] {
    OutgoingMessage message;
    message.kind = 1;
    message.payload.parts.resize(1000);
    return pair.a.session.send(pair.now, std::move(message));
  };
  std::size_t taken = 0;
  while (taken < 100 && send()) ++taken;
  CHECK(taken >= 1 && taken < 10);
  pair.exchange();
  CHECK_EQ(pair.b.delivered.size(), taken);
  CHECK(pair.b.lost.empty());
  for (int i = 0; i < 10; ++i) {
    pair.now += milliseconds(25);
    pair.b.session.tick(pair.now);
    pair.exchange();
  }
  CHECK(send());
}

TEST("who sends empty parts beyond the window is cut off") {
  Pair pair(a_megabyte());
  pair.connect();
  std::size_t taken = 0;
  for (std::uint64_t seq = 1; seq <= 100 && pair.b.lost.empty(); ++seq, ++taken) {
    wire::MessageHead head;
    head.kind = 1;
    head.body.bytes = 1;  // that never comes
    head.body.where = wire::PartWhere::stream;
    head.parts.resize(1000);
    wire::Frame frame = wire::make_frame(wire::FrameType::message, head);
    frame.header.seq = seq;
    pair.b.session.received(pair.now, 1, as_received(frame));
    pair.b.collect();
  }
  CHECK(taken >= 4 && taken < 12);
}

TEST("WINDOW holds calls back, and nothing else") {
  Pair pair;
  pair.connect();
  pair.b.session.set_receive_window(pair.now, 1000, 0);
  pair.exchange();
  CHECK(!pair.a.session.accepts(10, 0, true));
  CHECK(pair.a.session.accepts(10, 0, false));
  pair.b.session.set_receive_window(pair.now, 1000, 1);
  pair.exchange();
  CHECK(pair.a.session.accepts(10, 0, true));
}

TEST("a message over the limits is refused at the sender") {
  Limits limits;
  limits.max_body = 1000;
  Pair pair(limits);
  pair.connect();
  CHECK_THROWS(pair.send(pair.a, 1001, 1), ErrorCode::invalid_argument);
}

TEST("a silent peer is given up after three seconds, with its messages") {
  Pair pair;
  pair.connect();
  CHECK(pair.send(pair.a, 10, 5));
  pair.a.collect();
  pair.a.out.clear();  // swallowed
  for (int i = 0; i < 12 && pair.a.lost.empty(); ++i) {
    pair.now += milliseconds(249);
    pair.a.session.tick(pair.now);
    pair.a.collect();
  }
  CHECK(pair.a.lost.empty());
  pair.now += milliseconds(249);
  pair.a.session.tick(pair.now);
  pair.a.collect();
  CHECK_EQ(pair.a.lost.size(), 1u);
  CHECK_EQ(pair.a.lost[0].messages.size(), 1u);
  CHECK_EQ(pair.a.lost[0].messages[0].cookie, 5u);
  CHECK(pair.a.lost[0].messages[0].written == Ran::maybe);
}

TEST("who was stopped itself suspects nobody for a second") {
  Pair pair;
  pair.connect();
  pair.now += seconds(10);  // no tick came meanwhile
  pair.a.session.tick(pair.now);
  pair.a.collect();
  CHECK(pair.a.lost.empty());
  CHECK(!pair.a.session.suspected(pair.now));
  pair.exchange();  // what the peer had said is read, and it answers
  for (int i = 0; i < 8; ++i) {
    pair.now += milliseconds(250);
    pair.a.session.tick(pair.now);
    pair.b.session.tick(pair.now);
    pair.exchange();
  }
  CHECK(pair.a.lost.empty());
}

TEST("what breaks the protocol ends the session, not the process") {
  const auto breaks = [](wire::Frame frame) {
    Pair pair;
    pair.connect();
    pair.a.session.received(pair.now, 1, as_received(frame));
    pair.a.collect();
    CHECK_EQ(pair.a.lost.size(), 1u);
    CHECK(!pair.a.lost.empty() && pair.a.lost[0].reason.code == ErrorCode::wire);
    CHECK(!pair.a.session.ready());
  };
  breaks(wire::make_frame(wire::FrameType::ack, wire::Ack{99, {}}));
  breaks(wire::make_frame(wire::FrameType::ack, wire::Ack{0, {1}}));
  breaks(wire::make_frame(wire::FrameType::grant, wire::Grant{}));
  breaks(wire::make_frame(wire::FrameType::done, wire::Done{3}));
  breaks(wire::make_frame(wire::FrameType::welcome, wire::Hello{}));
  breaks(wire::make_frame(wire::FrameType::ack, bytes_of(3)));
  wire::Frame unnumbered = wire::make_frame(wire::FrameType::message, wire::MessageHead{});
  breaks(unnumbered);
  unnumbered.header.seq = kMaxSpan + 1;
  breaks(unnumbered);
  wire::MessageHead head;
  head.body.bytes = 10;  // more than the frame holds
  wire::Frame cut = wire::make_frame(wire::FrameType::message, head);
  cut.header.seq = 1;
  breaks(cut);
  head.body.bytes = 0;
  head.lane_prev = 1;
  wire::Frame before_itself = wire::make_frame(wire::FrameType::message, head);
  before_itself.header.seq = 1;
  breaks(before_itself);
}

TEST("small messages that wait for their lane are bounded by the window") {
  Limits limits;
  limits.send_window_bytes = std::size_t{1} << 20;
  Pair pair(limits);
  pair.connect();
  const Buffer body = bytes_of(std::size_t{10} << 10);
  wire::MessageHead head;
  head.kind = 1;
  head.body.bytes = body.size();
  std::uint64_t seq = 2;  // all wait for the first one, which never comes
  for (; pair.a.session.ready() && seq < 1000; ++seq) {
    head.lane_prev = seq - 1;
    wire::Frame frame = wire::make_frame(wire::FrameType::message, head);
    frame.header.seq = seq;
    frame.header.lane = 1;
    frame.payload = {body};
    pair.a.session.received(pair.now, 1, as_received(frame));
    pair.a.collect();
  }
  CHECK_EQ(pair.a.lost.size(), 1u);
  CHECK(!pair.a.lost.empty() && pair.a.lost[0].reason.code == ErrorCode::wire);
  CHECK(seq * body.size() > limits.send_window_bytes);
  CHECK(seq * body.size() < 3 * limits.send_window_bytes);
}

TEST("a standing grant is one part, once, on its connection") {
  const wire::PathTraits shm{true, 1 << 20, 20, 256 << 10, true};
  const MutableBuffer memory = HeapAllocator().allocate(1 << 20);
  // `b` has given `a` grant 7, and hears of a part of `bytes` in grant `number`.
  const auto name = [&](Pair& pair, std::uint64_t number, std::uint64_t bytes, std::uint64_t seq) {
    wire::MessageHead head;
    head.kind = 1;
    head.body = {10, 64, wire::PartWhere::inline_, 0};
    head.parts = {{bytes, 64, wire::PartWhere::placed, number}};
    wire::Frame frame = wire::make_frame(wire::FrameType::message, head, {bytes_of(10)});
    frame.header.seq = seq;
    pair.b.session.received(pair.now, 1, as_received(frame));
    pair.b.collect();
  };
  const auto joined = [&](Pair& pair) {
    pair.a.session.attach(pair.now, 1, wire::PathKind::shm, shm, false, pair.a.hello);
    pair.b.session.attach(pair.now, 1, wire::PathKind::shm, shm, true, pair.b.hello);
    pair.exchange();
    pair.b.session.grant_ready(pair.now, 1, 0, 0, {7, 1, 0, 1 << 20}, memory);
    CHECK_EQ(pair.b.session.preposted(), 1u);
    pair.exchange();
  };
  Pair good;
  joined(good);
  CHECK(!good.a.session.take_preposted(good.now, (1 << 20) + 1));
  CHECK(!good.a.session.take_preposted(good.now, (1 << 18) - 1));  // too roomy
  const auto taken = good.a.session.take_preposted(good.now, 1 << 18);
  CHECK(taken && taken->connection == 1 && taken->place.grant == 7);
  CHECK(!good.a.session.take_preposted(good.now, 1 << 18));
  name(good, 7, 1 << 18, 1);
  CHECK_EQ(good.b.delivered.size(), 1u);
  CHECK(!good.b.delivered.empty() && good.b.delivered[0].payload.parts[0].data() == memory.data() &&
        good.b.delivered[0].payload.parts[0].size() == std::size_t{1} << 18);
  CHECK(!good.b.delivered.empty() &&  // `a` can still write there
        good.b.delivered[0].payload.exposed == std::vector<std::uint32_t>{0});
  name(good, 7, 1 << 18, 2);
  CHECK_EQ(good.b.lost.size(), 1u);

  Pair large;
  joined(large);
  name(large, 7, (1 << 20) + 1, 1);
  CHECK_EQ(large.b.lost.size(), 1u);
  Pair small;
  joined(small);
  name(small, 7, (1 << 18) - 1, 1);
  CHECK_EQ(small.b.lost.size(), 1u);
  Pair unknown;
  joined(unknown);
  name(unknown, 8, 1 << 18, 1);
  CHECK_EQ(unknown.b.lost.size(), 1u);

  Pair unused;
  joined(unused);
  unused.now += seconds(5);
  unused.a.session.tick(unused.now);
  unused.exchange();
  CHECK_EQ(unused.b.session.preposted(), 0u);
  CHECK(!unused.a.session.take_preposted(unused.now, 1 << 20));
  CHECK(unused.b.lost.empty());
}

class NoMemory final : public Allocator {
 public:
  MutableBuffer allocate(std::size_t) override { throw std::bad_alloc(); }
};

TEST("a message without memory is delivered as an error") {
  NoMemory none;
  Pair pair;
  Side poor({2, 2}, {1, 1}, none, {});
  pair.a.session.attach(pair.now, 1, wire::PathKind::tcp, {}, false, pair.a.hello);
  poor.session.attach(pair.now, 1, wire::PathKind::tcp, {}, true, poor.hello);
  OutgoingMessage message;
  message.kind = 1;
  message.payload.body = bytes_of(10);
  message.payload.parts = {bytes_of(100'000)};
  for (int i = 0; i < 4; ++i) {
    pair.a.collect();
    for (; !pair.a.out.empty(); pair.a.out.pop_front()) {
      const wire::Frame& frame = pair.a.out.front();
      if (frame.header.type == wire::FrameType::chunk) {
        const auto chunk = wire::decode<wire::ChunkHead>(frame.control.span());
        CHECK(poor.session.chunk_target(1, chunk).empty());
        poor.session.chunk_received(pair.now, 1, chunk);
      } else {
        poor.session.received(pair.now, 1, as_received(frame));
      }
    }
    poor.collect();
    for (; !poor.out.empty(); poor.out.pop_front()) {
      pair.a.session.received(pair.now, 1, as_received(poor.out.front()));
    }
    if (i == 1) CHECK(pair.a.session.send(pair.now, OutgoingMessage(message)));
  }
  CHECK_EQ(poor.delivered.size(), 1u);
  CHECK(!poor.delivered.empty() && poor.delivered[0].error);
  CHECK(!poor.delivered.empty() && poor.delivered[0].payload.body.size() == 10);
}

TEST("the round trip is measured at once, and again while the connection is quiet or busy") {
  Pair pair;
  pair.connect();
  const auto round_trip = [&] { return pair.a.session.links(pair.now).at(0).last_round_trip; };
  CHECK(round_trip() == Duration(0));  // the connection is perfect
  pair.now += milliseconds(250);
  pair.a.session.tick(pair.now);  // quiet for so long: PING
  pair.a.collect();
  CHECK_EQ(pair.a.out.size(), 1u);
  pair.now += milliseconds(8);
  pair.exchange();
  CHECK(round_trip() == milliseconds(8));
  CHECK(pair.a.session.links(pair.now).at(0).round_trip == milliseconds(1));  // smoothed
  for (int i = 0; i < 60; ++i) {  // never quiet for as long as a PING waits for
    pair.now += milliseconds(100);
    CHECK(pair.send(pair.b, 10, 1));
    pair.exchange();
    pair.a.session.tick(pair.now);
    pair.exchange();
  }
  CHECK(round_trip() == Duration(0));
}

TEST("an answer to a PING that was never sent measures nothing") {
  Pair pair;
  pair.connect();
  const Duration before = pair.a.session.links(pair.now).at(0).round_trip;
  for (const std::uint64_t number : {0ULL, 2ULL, ~0ULL}) {
    pair.now += seconds(1);
    pair.a.session.received(
        pair.now, 1, as_received(wire::make_frame(wire::FrameType::pong, wire::Ping{number})));
  }
  CHECK(pair.a.session.links(pair.now).at(0).round_trip == before);
}

}  // namespace moolink::session::testing
