#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/descriptor.h"

namespace moolink::io {

// Messages with descriptors over a connected, non-blocking SOCK_SEQPACKET Unix socket (SCM_RIGHTS).

inline constexpr std::size_t kMaxPassedDescriptors = 128;
inline constexpr std::size_t kMaxPassedBytes = 256;

struct DescriptorMessage {
  std::vector<std::byte> bytes;  // never empty: an empty message means end of file
  std::vector<Descriptor> descriptors;
};

// False: the socket's buffer is full, try again later. Throws Exception{peer_lost} if the
// connection is gone; the caller keeps the descriptors.
bool send_message(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors);

enum class Received { message, nothing, end };

// Throws Exception{wire} if the message is larger than the limits above: its truncated part is
// lost, so the connection must be closed.
Received receive_message(int socket, DescriptorMessage& message);

}  // namespace moolink::io
