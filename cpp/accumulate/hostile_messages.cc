#include "accumulate/hostile_messages.h"

#ifdef MOOLINK_CRASH_POINTS
#include "wire/hostile_number.h"

namespace moolink::accumulate {
namespace {

void lie_of(SnapshotInfo& info) {
  wire::lie("snapshot.chunk_bytes", info.chunk_bytes);
  if (!info.segments.empty()) wire::lie("snapshot.bytes", info.segments.front());
  wire::lie("snapshot.version", info.id.version);
  if (!info.crc32c.empty()) wire::lie("snapshot.crc32c", info.crc32c.front());
}

}  // namespace

Envelope told(Envelope envelope) {
  if (auto* offer = std::get_if<Offer>(&envelope.message)) {
    wire::lie("offer.k", offer->k);
    wire::lie("offer.batch", offer->batch);
    wire::lie("offer.version", offer->version);
  } else if (auto* cut = std::get_if<Cut>(&envelope.message)) {
    wire::lie("cut.round", cut->record.round);
    wire::lie("cut.total", cut->record.total);
    wire::lie("cut.shared", cut->shared);
    if (!cut->record.contributions.empty()) {
      wire::lie("cut.k", cut->record.contributions[0].k);
      wire::lie("cut.batch", cut->record.contributions[0].batch);
    }
  } else if (auto* flush = std::get_if<Flush>(&envelope.message)) {
    wire::lie("flush.active", flush->active);
    wire::lie("flush.version", flush->version);
    wire::lie("flush.have", flush->have);
  } else if (auto* resume = std::get_if<Resume>(&envelope.message)) {
    wire::lie("resume.round", resume->round);
    for (MemberStanding& member : resume->members) {
      if (member.instance != resume->leader && wire::lie_about("resume.refused")) {
        member.refused = "no reason";
      }
    }
  } else if (auto* settings = std::get_if<Settings>(&envelope.message)) {
    wire::lie("settings.virtual_batch_size", settings->virtual_batch_size);
    wire::lie("settings.parallel_gradients", settings->parallel_gradients);
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
    wire::lie("snapshot.chunk", chunk->chunk);
  }
  return envelope;
}

}  // namespace moolink::accumulate
#endif
