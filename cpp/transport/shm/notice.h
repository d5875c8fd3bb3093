#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/descriptor.h"
#include "base/uid.h"
#include "io/descriptor_passing.h"

namespace moolink::transport::shm {

// What goes over the Unix socket beside the rings: whatever needs descriptors, and the farewell.
enum class NoticeKind : std::uint8_t {
  greeting,  // first, by both sides; descriptors: the ring that its sender reads, its doorbell
  segment,   // grants will lie in this segment; descriptors: the segment
  retire,    // no grant will lie in that segment any more
  share,     // descriptors for the layers above, under a key
  bye,       // the end of file that follows is meant, and no sign of death
  lend,      // loans will lie in this segment; descriptors: the segment
  unlend,    // no loan will lie in that segment any more
};
constexpr NoticeKind enum_max(NoticeKind) { return NoticeKind::unlend; }

inline constexpr std::uint32_t kNoticeMagic = 0x6d68736d;  // "mshm" in memory
inline constexpr std::uint32_t kNoticeVersion = 2;

struct Notice {
  std::uint32_t magic = kNoticeMagic;
  std::uint32_t version = kNoticeVersion;
  NoticeKind kind = NoticeKind::bye;
  // segment, retire: its number in the connection; lend, unlend: in its lender's pool
  std::uint64_t segment = 0;
  Uid key;  // share

  template <class Fields>
  void fields(Fields& f) {
    f(magic, version, kind, segment, key);
  }
};

// False: the socket is full. Throws Exception{peer_lost} if the connection is gone.
bool send_notice(int socket, const Notice& notice, std::span<const int> descriptors);
// Throws Exception{wire} if the message is no notice or does not have the descriptors of its kind.
Notice decode_notice(const io::DescriptorMessage& message);

}  // namespace moolink::transport::shm
