#include "accumulate/lies.h"

#ifdef MOOLINK_CRASH_POINTS
#include "wire/lie.h"

namespace moolink::accumulate {
namespace {

void lie_signed(const char* name, std::int64_t& number) {
  auto told = static_cast<std::uint64_t>(number);
  wire::lie(name, told);
  number = static_cast<std::int64_t>(told);
}

void lie_of(SnapshotInfo& info) {
  std::uint64_t chunk_bytes = info.chunk_bytes;
  wire::lie("snapshot.chunk_bytes", chunk_bytes);
  info.chunk_bytes = static_cast<std::uint32_t>(chunk_bytes);
  if (!info.segments.empty()) wire::lie("snapshot.bytes", info.segments.front());
  wire::lie("snapshot.version", info.id.version);
}

}  // namespace

Envelope told(Envelope envelope) {
  if (auto* offer = std::get_if<Offer>(&envelope.message)) {
    wire::lie("offer.k", offer->k);
    lie_signed("offer.batch", offer->batch);
    wire::lie("offer.version", offer->version);
  } else if (auto* cut = std::get_if<Cut>(&envelope.message)) {
    wire::lie("cut.round", cut->record.round);
    lie_signed("cut.total", cut->record.total);
    wire::lie("cut.shared", cut->shared);
    if (!cut->record.contributions.empty()) wire::lie("cut.k", cut->record.contributions[0].k);
  } else if (auto* have = std::get_if<Have>(&envelope.message)) {
    wire::lie("have.have", have->have);
    wire::lie("have.delivered", have->delivered);
  } else if (auto* stable = std::get_if<Stable>(&envelope.message)) {
    wire::lie("stable.round", stable->round);
  } else if (auto* ready = std::get_if<SnapshotReady>(&envelope.message)) {
    lie_of(ready->info);
  }
  return envelope;
}

SnapshotEnvelope told(SnapshotEnvelope envelope) {
  if (auto* info = std::get_if<SnapshotInfo>(&envelope.message)) {
    lie_of(*info);
  } else if (auto* chunk = std::get_if<Chunk>(&envelope.message)) {
    std::uint64_t number = chunk->chunk;
    wire::lie("snapshot.chunk", number);
    chunk->chunk = static_cast<std::uint32_t>(number);
  }
  return envelope;
}

}  // namespace moolink::accumulate
#endif
