#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "base/descriptor.h"
#include "base/uid.h"
#include "io/descriptor_passing.h"

namespace moolink::transport::shm {

// Messages over the Unix socket beside the rings: those with descriptors, and the farewell.
enum class NoticeKind : std::uint8_t {
  greeting,  // first, by both sides; descriptors: the ring that its sender reads, its doorbell
  pass,      // the receiver may use this segment; descriptors: the segment
  retire,    // the sender of that segment will name it no more
  mapped,    // the answer to a segment to read, once it is mapped
  share,     // descriptors for the layers above, under a key
  bye,       // the end of file that follows is intended, and no sign of death
  receives,  // arrays are received on this CUDA device: its memory may be lent
  refuses,   // memory of this CUDA device could not be mapped: it is not to be lent any more
};
constexpr NoticeKind enum_max(NoticeKind) { return NoticeKind::refuses; }

// What the other side may do with a segment. Each kind has its own numbers.
enum class Access : std::uint8_t {
  fill,   // its sender's grants
  read,   // its sender's lending pool
  block,  // to read, too: memory of a CUDA device
};
constexpr Access enum_max(Access) { return Access::block; }

inline constexpr std::uint32_t kNoticeMagic = 0x6d68736d;  // "mshm" in memory
inline constexpr std::uint32_t kNoticeVersion = 4;

struct Notice {
  std::uint32_t magic = kNoticeMagic;
  std::uint32_t version = kNoticeVersion;
  NoticeKind kind = NoticeKind::bye;
  Access access = Access::read;  // pass, retire
  std::uint64_t segment = 0;     // pass, retire, mapped
  Uid key{};                     // share; receives, refuses, pass of a block: the device
  std::uint64_t bytes = 0;       // pass of a block

  auto fields() { return std::tie(magic, version, kind, access, segment, key, bytes); }
};

// False: the socket is full. Throws Exception{peer_lost} if the connection is gone.
bool send_notice(int socket, const Notice& notice, std::span<const int> descriptors);
// The same, but false also if it cannot be sent: the end of file gives the reason.
bool try_send_notice(int socket, const Notice& notice, std::span<const int> descriptors);
// Throws Exception{wire} if the message is no notice or lacks the descriptors of its kind.
Notice decode_notice(const io::DescriptorMessage& message);

}  // namespace moolink::transport::shm
