#include "accumulate/hostile_messages.h"

#include <variant>

#include "wire/hostile_messages.h"

namespace moolink::accumulate {
namespace {

void lie_in(SnapshotInfo& info) {
  wire::lie("snapshot.chunk_bytes", info.chunk_bytes);
  if (!info.segments.empty()) wire::lie("snapshot.bytes", info.segments.front());
  wire::lie("snapshot.version", info.id.version);
}

}  // namespace

void lie_in(Message& message) {
  if (auto* offer = std::get_if<Offer>(&message)) {
    wire::lie("offer.k", offer->k);
    wire::lie("offer.batch", offer->batch);
    wire::lie("offer.version", offer->version);
  } else if (auto* cut = std::get_if<Cut>(&message)) {
    wire::lie("cut.round", cut->record.round);
    wire::lie("cut.total", cut->record.total);
    wire::lie("cut.shared", cut->shared);
    if (!cut->record.contributions.empty()) {
      wire::lie("cut.k", cut->record.contributions[0].k);
      wire::lie("cut.batch", cut->record.contributions[0].batch);
    }
  } else if (auto* flush = std::get_if<Flush>(&message)) {
    wire::lie("flush.active", flush->active);
    wire::lie("flush.version", flush->version);
    wire::lie("flush.have", flush->have);
  } else if (auto* resume = std::get_if<Resume>(&message)) {
    wire::lie("resume.round", resume->round);
    for (MemberStatus& member : resume->members) {
      if (member.instance != resume->leader && wire::lie_about("resume.refused")) {
        member.refused = "no reason";
      }
    }
  } else if (auto* settings = std::get_if<Settings>(&message)) {
    wire::lie("settings.virtual_batch_size", settings->virtual_batch_size);
    wire::lie("settings.parallel_gradients", settings->parallel_gradients);
  } else if (auto* have = std::get_if<Have>(&message)) {
    wire::lie("have.have", have->have);
    wire::lie("have.delivered", have->delivered);
  } else if (auto* stable = std::get_if<Stable>(&message)) {
    wire::lie("stable.round", stable->round);
  } else if (auto* ready = std::get_if<SnapshotReady>(&message)) {
    lie_in(ready->info);
  }
}

void lie_in(decltype(SnapshotEnvelope::message)& message) {
  if (auto* info = std::get_if<SnapshotInfo>(&message)) {
    lie_in(*info);
  } else if (auto* chunk = std::get_if<Chunk>(&message)) {
    wire::lie("snapshot.chunk", chunk->chunk);
  }
}

}  // namespace moolink::accumulate
