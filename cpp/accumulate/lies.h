#pragma once

// As wire/lies.h, of what accumulators say.

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
