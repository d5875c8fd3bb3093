// Chunks whose bytes come after later frames and chunks, as over the streams of a tcp connection.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "check.h"
#include "pair.h"

namespace moolink::session::testing {
namespace streams_test {

constexpr std::size_t kBytes = (std::size_t{4} << 20) + 5;  // five chunks

struct Chunk {
  wire::ChunkHead head;
  Buffer bytes;
  std::span<std::byte> target;
};

// Announces the chunks of one message from `a` to `b` without their bytes; returns the chunks.
std::vector<Chunk> announce(Pair& pair) {
  pair.connect();
  CHECK(pair.send(pair.a, kBytes, 1));
  std::vector<Chunk> chunks;
  for (pair.a.collect(); !pair.a.out.empty(); pair.a.collect()) {
    for (; !pair.a.out.empty(); pair.a.out.pop_front()) {
      const wire::Frame& frame = pair.a.out.front();
      if (frame.header.type != wire::FrameType::chunk) {
        pair.b.session.received(pair.now, 1, as_received(frame));
        continue;
      }
      const auto head = wire::decode<wire::ChunkHead>(frame.control.span());
      chunks.push_back({head, frame.payload.front(), pair.b.session.chunk_target(1, head)});
    }
    pair.a.session.writable(pair.now, 1);
  }
  return chunks;
}

void arrive(Pair& pair, const Chunk& chunk) {
  std::memcpy(chunk.target.data(), chunk.bytes.data(), chunk.bytes.size());
  pair.b.session.chunk_received(pair.now, 1, chunk.head);
  pair.b.collect();
}

TEST("chunks complete in any order, and the last one completes the message") {
  Pair pair;
  std::vector<Chunk> chunks = announce(pair);
  CHECK_EQ(chunks.size(), 5u);
  std::ranges::reverse(chunks);
  for (const Chunk& chunk : chunks) {
    CHECK(pair.b.delivered.empty());
    arrive(pair, chunk);
  }
  CHECK_EQ(pair.b.delivered.size(), 1u);
  pair.b.session.chunk_received(pair.now, 1, chunks.front().head);  // counts once
  CHECK(pair.b.lost.empty());
}

TEST("a chunk is announced once, in order, and completes once") {
  const auto lies = {+[](wire::ChunkHead& head) { head.offset += 1; },
                     +[](wire::ChunkHead& head) { head.part = 7; },
                     +[](wire::ChunkHead& head) { head.bytes = kBytes + 1; }};
  for (const auto& lie : lies) {
    Pair pair;
    pair.connect();
    CHECK(pair.send(pair.a, kBytes, 1));
    pair.a.collect();
    pair.b.session.received(pair.now, 1, as_received(pair.a.out.front()));
    auto head = wire::decode<wire::ChunkHead>(pair.a.out.at(1).control.span());
    lie(head);
    CHECK(pair.b.session.chunk_target(1, head).empty());
    pair.b.collect();
    CHECK_EQ(pair.b.lost.size(), 1u);
  }
  Pair pair;
  const std::vector<Chunk> chunks = announce(pair);
  CHECK(pair.b.session.chunk_target(1, chunks.front().head).empty());  // again
  pair.b.collect();
  CHECK_EQ(pair.b.lost.size(), 1u);
}

TEST("a later attempt on a connection that still writes an earlier one is refused") {
  Pair pair;
  announce(pair);
  wire::MessageHead head;
  head.attempt = 1;
  head.kind = 1;
  head.body = {kBytes, 64, wire::PartWhere::stream, 0};
  wire::Frame frame = wire::make_frame(wire::FrameType::message, head);
  frame.header.seq = 1;
  pair.b.session.received(pair.now, 1, as_received(frame));
  pair.b.collect();
  CHECK_EQ(pair.b.lost.size(), 1u);
  CHECK(pair.b.lost.empty() || pair.b.lost[0].reason.code == ErrorCode::wire);
}

}  // namespace streams_test
}  // namespace moolink::session::testing
