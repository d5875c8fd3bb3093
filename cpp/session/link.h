#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/time.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::session {

using wire::ConnectionId;

// A part may be placed in a standing grant of at most this many times its size.
inline constexpr std::uint64_t kRoomiestGrant = 4;

// A session's state of one of its connections.
struct Link {
  ConnectionId connection = 0;
  wire::PathKind kind = wire::PathKind::tcp;
  wire::PathTraits traits;
  std::size_t chunk_bytes = 0;  // the size both sides accept
  bool dialled = false;
  std::uint64_t generation = 0;

  // Greeting: the connection carries messages once both sides have named the same session.
  wire::Hello ours;
  std::optional<std::uint64_t> said;  // the session last named on it
  bool attached = false;

  // Liveness.
  Time last_heard{};
  Time ping_at = kNever;
  std::uint64_t pings = 0;
  Time pinged_at{};
  std::array<Time, 8> ping_times{};  // of the last ones, by number
  Duration round_trip{-1};           // smoothed; negative: not measured yet
  Duration last_round_trip{-1};

  // Sending of parts: messages with bytes to write, taken in turn; the amount in transit is
  // bounded, so that a small message waits for a few chunks at most.
  std::deque<std::uint64_t> turns;
  std::uint32_t chunks_queued = 0;  // since the transport last reported writable
  std::uint32_t grants_asked = 0;
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> filling;  // grant -> seq, part

  // The peer's memory for parts of this side, in the order of its grants.
  struct Standing {
    wire::GrantPlace place;
    Time since{};
  };
  std::vector<Standing> standing;

  // Announced chunks whose bytes are not complete: message, part, offset.
  std::set<std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>> receiving;
};

}  // namespace moolink::session
