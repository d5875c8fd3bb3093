#pragma once

#include <cstdint>

namespace moolink {

// How a peer was lost.
enum class Down : std::uint8_t {
  dead,         // proven: pidfd, refused reconnect, another instance under its name
  unreachable,  // not heard for evict_after, or the session is lost: the peer itself may live
  closed,       // it said CLOSE
};

}  // namespace moolink
