#pragma once

#include <cstddef>
#include <cstdint>

namespace moolink {

// Checked before any allocation for bytes from outside.
struct Limits {
  std::size_t max_frame = std::size_t{16} << 20;          // one frame, header included
  std::size_t max_body = std::size_t{256} << 20;          // a message without its parts
  std::size_t max_part = std::size_t{64} << 30;           // one tensor
  std::size_t max_parts = 65536;                          // tensors in one message
  std::size_t max_message = std::size_t{64} << 30;        // all parts together
  std::size_t max_depth = 200;                            // nesting of a value
  std::size_t send_window_bytes = std::size_t{64} << 20;  // unacknowledged, in one session
  std::size_t send_window_messages = 4096;
};

}  // namespace moolink
