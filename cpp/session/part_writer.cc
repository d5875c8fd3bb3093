#include "session/part_writer.h"

#include <algorithm>

namespace moolink::session {

namespace {

// Chunks given to the connection between two calls of writable(), and requests at a time: enough to
// keep it busy, few enough that a small message gets through soon.
constexpr std::uint32_t kMaxChunks = 2;
constexpr std::uint32_t kMaxRequests = 8;

}  // namespace

void PartWriter::add(std::uint64_t seq, Outgoing& outgoing) {
  take_turn(seq, outgoing);
  write();
}

void PartWriter::ready(const wire::Grant& grant) {
  Outgoing* outgoing = outbox_.find(grant.seq);
  LargePart* part = outgoing == nullptr || outgoing->connection != connection_
                        ? nullptr
                        : outgoing->find_large(grant.part);
  if (part == nullptr || part->state != LargePart::State::requested) {
    wire::fail("a grant that was not asked for");
  }
  if (grant.grant == 0) {  // no memory of that kind: send chunks
    --requests_;
    outgoing->stream(*part);
    add(grant.seq, *outgoing);
    return;
  }
  const Buffer& bytes = outgoing->bytes_of(grant.part);
  if (grant.bytes < bytes.size()) wire::fail("a grant smaller than its part");
  part->state = LargePart::State::filling;
  filling_[grant.grant] = {grant.seq, grant.part};
  sink_.add(FillGrant{connection_, {grant.grant, grant.segment, grant.offset, grant.bytes}, bytes});
}

void PartWriter::filled(std::uint64_t grant) {
  const auto filling = filling_.find(grant);
  if (filling == filling_.end()) return;
  const auto [seq, part] = filling->second;
  filling_.erase(filling);
  if (Outgoing* outgoing = outbox_.find(seq)) {
    outgoing->find_large(part)->state = LargePart::State::sent;
  }
  sink_.write(connection_, wire::FrameType::done, wire::Done{grant});
  --requests_;
  write();
}

void PartWriter::writable() {
  chunks_queued_ = 0;
  write();
}

void PartWriter::take_turn(std::uint64_t seq, Outgoing& outgoing) {
  if (std::exchange(outgoing.has_turn, true)) return;
  turns_.push_back(seq);
}

void PartWriter::write() {
  std::size_t idle = 0;  // turns in a row in which nothing could be written
  while (idle < turns_.size()) {
    const std::uint64_t seq = turns_.front();
    turns_.pop_front();
    Outgoing* outgoing = outbox_.find(seq);
    if (outgoing == nullptr || outgoing->connection != connection_) continue;
    outgoing->has_turn = false;
    idle = write_one(seq, *outgoing) ? 0 : idle + 1;
    if (!outgoing->unsent->empty()) take_turn(seq, *outgoing);
  }
}

// Writes a chunk of the first part that may be written now, or the request for its memory. False:
// none may.
bool PartWriter::write_one(std::uint64_t seq, Outgoing& outgoing) {
  const Unsent& unsent = *outgoing.unsent;
  const bool may_request = unsent.has_to_request() && requests_ < kMaxRequests;
  const bool may_stream = !unsent.to_stream.empty() && chunks_queued_ < kMaxChunks;
  if (!may_request && !may_stream) return false;
  if (may_request &&
      (!may_stream || unsent.to_request[unsent.next_to_request] < unsent.to_stream.top())) {
    request(seq, outgoing);
  } else {
    write_chunk(seq, outgoing);
  }
  return true;
}

void PartWriter::request(std::uint64_t seq, Outgoing& outgoing) {
  Unsent& unsent = *outgoing.unsent;
  LargePart& part = outgoing.large[unsent.to_request[unsent.next_to_request++]];
  part.state = LargePart::State::requested;
  ++requests_;
  const std::size_t size = outgoing.bytes_of(part.part).size();
  sink_.write(connection_, wire::FrameType::want, wire::Want{seq, part.part, size});
}

void PartWriter::write_chunk(std::uint64_t seq, Outgoing& outgoing) {
  LargePart& part = outgoing.large[outgoing.unsent->to_stream.top()];
  const Buffer& bytes = outgoing.bytes_of(part.part);
  const std::size_t offset = static_cast<std::size_t>(part.offset);
  const std::size_t size = std::min(chunk_bytes_, bytes.size() - offset);
  const wire::ChunkHead head{seq, part.part, outgoing.attempt, offset, size};
  part.offset += size;
  if (part.offset == bytes.size()) {
    part.state = LargePart::State::sent;
    outgoing.unsent->to_stream.pop();
  }
  ++chunks_queued_;
  sink_.write(connection_,
              wire::make_frame(wire::FrameType::chunk, head, {bytes.slice(offset, size)}));
}

}  // namespace moolink::session
