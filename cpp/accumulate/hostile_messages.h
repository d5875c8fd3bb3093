#pragma once

// Like wire/hostile_messages.h, for the messages of accumulators; tests/hooks/accumulate has the
// names.

#include "accumulate/messages.h"

namespace moolink::accumulate {

#ifdef MOOLINK_CRASH_POINTS
void lie_in(Message& message);
void lie_in(decltype(SnapshotEnvelope::message)& message);
#else
constexpr void lie_in(Message& /*message*/) {}
constexpr void lie_in(decltype(SnapshotEnvelope::message)& /*message*/) {}
#endif

}  // namespace moolink::accumulate
