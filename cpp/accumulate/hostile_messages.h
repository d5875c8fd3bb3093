#pragma once

// Like wire/hostile_messages.h, for the messages of accumulators.

#include "accumulate/messages.h"

namespace moolink::accumulate {

#ifdef MOOLINK_CRASH_POINTS
Envelope told(Envelope envelope);
SnapshotEnvelope told(SnapshotEnvelope envelope);
#else
inline const Envelope& told(const Envelope& envelope) { return envelope; }
inline const SnapshotEnvelope& told(const SnapshotEnvelope& envelope) { return envelope; }
#endif

}  // namespace moolink::accumulate
