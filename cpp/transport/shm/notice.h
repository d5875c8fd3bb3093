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
  segment,   // grants will use this segment; descriptors: the segment
  retire,    // no grant will use that segment any more
  share,     // descriptors for the layers above, under a key
  bye,       // the end of file that follows is intended, and no sign of death
  lend,      // loans will use this segment; descriptors: the segment
  unlend,    // no loan will use that segment any more
  receives,  // arrays are received on this CUDA device: its memory may be lent
  lend_of_device,  // like lend, of so many bytes of a device's memory
  refuses,         // memory of this CUDA device could not be mapped: it is not to be lent any more
};
constexpr NoticeKind enum_max(NoticeKind) { return NoticeKind::refuses; }

inline constexpr std::uint32_t kNoticeMagic = 0x6d68736d;  // "mshm" in memory
inline constexpr std::uint32_t kNoticeVersion = 3;

struct Notice {
  std::uint32_t magic = kNoticeMagic;
  std::uint32_t version = kNoticeVersion;
  NoticeKind kind = NoticeKind::bye;
  // segment, retire: its number in the connection; lend, unlend, lend_of_device: its lender's
  std::uint64_t segment = 0;
  Uid key{};                // share; receives, lend_of_device, refuses: the device
  std::uint64_t bytes = 0;  // lend_of_device

  auto fields() { return std::tie(magic, version, kind, segment, key, bytes); }
};

// False: the socket is full. Throws Exception{peer_lost} if the connection is gone.
bool send_notice(int socket, const Notice& notice, std::span<const int> descriptors);
// The same, but false also if it cannot be sent: the end of file gives the reason.
bool try_send_notice(int socket, const Notice& notice, std::span<const int> descriptors);
// Throws Exception{wire} if the message is no notice or lacks the descriptors of its kind.
Notice decode_notice(const io::DescriptorMessage& message);

}  // namespace moolink::transport::shm
