#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "base/descriptor.h"
#include "base/uid.h"
#include "io/descriptor_passing.h"

namespace moolink::transport::shm {

// Messages over the Unix socket beside the rings.
enum class NoticeKind : std::uint8_t {
  greeting,  // first, by both sides; descriptors: the ring that its sender reads, its doorbell
  pass,      // the receiver may use this segment; descriptors: the segment
  retire,    // the sender of the segment will not name it again
  mapped,    // the answer to `pass` of a segment to read, once it is mapped
  share,     // descriptors for the layers above, under a key
  bye,       // the end of file that follows is intended, and no sign of death
  receives,  // the sender receives arrays on this CUDA device: the device's memory may be lent
  refuses,   // the sender could not map memory of this CUDA device: it must not be lent again
};
constexpr NoticeKind enum_max(NoticeKind) { return NoticeKind::refuses; }

// The receiver's access to a segment. Each kind has its own numbers.
enum class Access : std::uint8_t {
  fill,   // writes to the sender's grants
  read,   // reads the sender's lending pool
  block,  // uses memory of a CUDA device
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
