#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "base/uid.h"
#include "device/block.h"
#include "memory/borrowed_segment.h"
#include "memory/lending_pool.h"
#include "memory/segment.h"
#include "transport/grant_pool.h"
#include "transport/shm/notice.h"
#include "wire/path.h"

namespace moolink::transport::shm {

// The memory that the two ends of a connection share beside its rings. The rule of ownership: a
// segment belongs to the process that made it, which alone passes it, once a connection, and
// retires it; the other side unmaps it with its last use after that.

inline constexpr std::size_t kMaxSegments = 16384;  // that one side passes, not retired

struct SegmentId {
  Access access = Access::read;
  std::uint64_t number = 0;

  auto operator<=>(const SegmentId&) const = default;
};

// The segment of a loan: of the lending pool, or a block of a device.
inline SegmentId to_read(std::uint64_t number) {
  return {(number & wire::kDeviceSegments) != 0 ? Access::block : Access::read, number};
}

// What this side has passed to the peer.
class PassedSegments {
 public:
  // `lending`: null: this process lends no memory but that of devices.
  PassedSegments(std::shared_ptr<GrantPool> grants, const memory::LendingPool* lending)
      : grants_(std::move(grants)), lending_(lending) {}

  // Passes the segment through the socket unless that was done. False: the socket is full or the
  // connection gone, the segment is gone, or `most` segments have been passed.
  bool pass(int socket, SegmentId segment, std::size_t most = kMaxSegments);
  // The peer says that it has mapped a segment to read. Throws Exception{wire} if no segment was
  // passed under such a number.
  void mapped(std::uint64_t number);
  bool is_mapped(std::uint64_t number) const;
  bool changed() const { return retired() != seen_; }
  // Reports retired segments to the peer; those that do not fit into the socket follow later.
  void tell_retired(int socket);

  // The peer receives arrays on the device. Throws Exception{wire} if it has said so of too many.
  void peer_receives(const Uid& device);
  void peer_refuses(const Uid& device) { devices_.erase(device); }
  bool may_lend_of(int device) const;

 private:
  std::shared_ptr<memory::Segment> find(SegmentId segment) const;
  bool pass_block(int socket, std::uint64_t number) const;
  bool is_there(SegmentId segment) const;
  std::uint64_t retired() const;

  std::shared_ptr<GrantPool> grants_;
  const memory::LendingPool* lending_;
  std::uint64_t seen_ = 0;             // of retired()
  std::map<SegmentId, bool> passed_;   // and whether the peer has mapped it
  std::uint64_t highest_to_read_ = 0;  // number ever passed
  std::set<Uid> devices_;              // on which the peer receives
};

// What the peer has passed to this side. Buffers of it keep their segment mapped.
class PeerSegments {
 public:
  // Throws Exception{wire} if it is no segment, its number is taken, there are too many, or it is
  // of a device on which nothing is received. If the system does not map a segment to read or a
  // block, its first loan tries again.
  void add(const Notice& notice, Descriptor descriptor);
  // Throws Exception{wire} if it is unknown.
  void remove(SegmentId segment);
  bool knows(SegmentId segment) const { return segments_.contains(segment); }

  // Throws Exception{wire} if the place is not within a segment to fill.
  MutableBuffer at(const wire::GrantPlace& place) const;
  // Throws Exception{wire} if the place is not within a segment to read or a block. Another
  // exception: it cannot be mapped here; if it is a block, the peer is told to lend none of that
  // device any more.
  Buffer at(const wire::LoanPlace& place, int socket);
  // The whole of a segment to read. Null: it is not mapped.
  LentBytes bytes(std::uint64_t number) const;

  // Tells the peer which segments to read are mapped now; what does not fit follows later.
  void tell_mapped(int socket);
  // Tells the peer on which devices arrays are received, if that has changed.
  void tell_devices(int socket);
  // In a forked child.
  void abandon() noexcept;

 private:
  struct Segment {
    Descriptor descriptor{};  // until it is mapped
    int device = 0;           // of a block
    std::uint64_t bytes = 0;  // of a block
    // One of these.
    std::shared_ptr<memory::Segment> to_fill = nullptr;
    std::shared_ptr<memory::BorrowedSegment> to_read = nullptr;
    std::shared_ptr<const device::Block> block = nullptr;
  };

  static Segment block(const Notice& notice);
  void map_to_read(std::uint64_t number, Segment& segment);
  static void map_block(Segment& segment, int socket);

  std::map<SegmentId, Segment> segments_;
  std::vector<std::uint64_t> untold_;  // mapped
  std::uint64_t told_devices_ = 0;     // as bits
};

}  // namespace moolink::transport::shm
