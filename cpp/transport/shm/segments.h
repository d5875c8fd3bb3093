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
#include "wire/payload.h"

namespace moolink::transport::shm {

// The memory that the two ends of a connection share beside its rings. A segment belongs to the
// process that made it. Only this process passes the segment, once for each connection, and retires
// it. After that the other side unmaps it with its last use.

inline constexpr std::size_t kMaxSegments = 16384;  // passed by one side and not retired

struct SegmentId {
  Access access = Access::read;
  std::uint64_t number = 0;

  auto operator<=>(const SegmentId&) const = default;
};

// The segment of a loan: one of the lending pool, or a block of a device.
inline SegmentId to_read(std::uint64_t number) {
  return {(number & wire::kDeviceSegments) != 0 ? Access::block : Access::read, number};
}

// The segments that this side has passed to the peer.
class PassedSegments {
 public:
  // `lending`: null: this process lends only memory of devices.
  PassedSegments(std::shared_ptr<GrantPool> grants, const memory::LendingPool* lending)
      : grants_(std::move(grants)), lending_(lending) {}

  // Passes the segment through the socket, unless it was passed before. False: the socket is full,
  // the connection or the segment is gone, the device's block cannot be shared, or `most` segments
  // are passed and not retired.
  bool pass(int socket, SegmentId segment, std::size_t most = kMaxSegments);
  // The peer has reported that it mapped a segment to read. Throws Exception{wire} if the number is
  // above all that were passed.
  void mapped(std::uint64_t number);
  bool is_mapped(std::uint64_t number) const;
  bool changed() const { return retired() != seen_; }
  // Reports retired segments to the peer. If the socket is full, a later call reports the rest.
  void tell_retired(int socket);

  // The peer receives arrays on the device. Throws Exception{wire} if it has named too many.
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
  std::uint64_t seen_ = 0;             // value of retired() at the last report
  std::map<SegmentId, bool> passed_;   // true: the peer has mapped it
  std::uint64_t highest_to_read_ = 0;  // the highest number ever passed
  std::set<Uid> devices_;              // on which the peer receives
};

// The segments that the peer has passed to this side. Their buffers keep them mapped.
class PeerSegments {
 public:
  // Maps a segment to fill or to read; the first loan of a block maps the block. If the system does
  // not map a segment to read, its next loan tries again. Throws Exception{wire} if the descriptor
  // is no segment, the number is taken, there are too many segments, or the block is too large or
  // of a device on which this process receives no arrays.
  void add(const Notice& notice, Descriptor descriptor);
  // Throws Exception{wire} if the segment is unknown.
  void remove(SegmentId segment);
  bool knows(SegmentId segment) const { return segments_.contains(segment); }

  // Throws Exception{wire} if the place is not within a segment to fill.
  MutableBuffer at(const wire::GrantPlace& place) const;
  // Throws Exception{wire} if the place is not within a segment to read or a block, and another
  // exception if the segment cannot be mapped here. If that is a block, it also asks the peer to
  // lend no more memory of that device.
  Buffer at(const wire::LoanPlace& place, int socket);
  // The whole of a segment to read. Null: it is not mapped.
  LentBytes bytes(std::uint64_t number) const;

  // Reports the segments to read that are mapped. If the socket is full, a later call reports the
  // rest.
  void tell_mapped(int socket);
  // Reports the devices on which this process receives arrays, unless they were reported before.
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
  std::vector<std::uint64_t> untold_;  // mapped and not reported
  std::uint64_t told_devices_ = 0;     // one bit for each device
};

}  // namespace moolink::transport::shm
