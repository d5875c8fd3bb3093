#pragma once

#include <cstdint>

#include "base/limits.h"
#include "base/time.h"
#include "base/uid.h"

namespace moolink::session {

struct Timing {
  Duration ping_after = milliseconds(250);  // quiet for this long: ask
  Duration measure_every = seconds(5);      // the round trip, on a connection that is never quiet
  Duration suspect_after = seconds(1);      // silent for this long: use another path
  Duration evict_after = seconds(3);        // silent for this long: the session is lost
  Duration late_after = milliseconds(500);  // a tick so late means that this side was stopped,
  Duration trust_for = seconds(1);          // and it suspects no peer for this long
  Duration ack_after = milliseconds(25);    // acknowledge without other traffic to carry it
  std::uint32_t ack_every = 16;             // ... or after this many messages
  Duration preposted_for = seconds(5);      // a pre-posted buffer unused for this long is returned
};

struct Config {
  Uid self;
  Uid peer;
  std::uint64_t first_id = 0;  // ids of sessions are above it; rises with each Session of a process
  Limits limits;
  Timing timing;
};

}  // namespace moolink::session
