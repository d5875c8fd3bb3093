#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <variant>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "base/uid.h"
#include "device/block.h"
#include "memory/borrowed_segment.h"
#include "memory/lending_pool.h"
#include "wire/path.h"

namespace moolink::transport::shm {

// The segments that one peer has received: of this process's lending pool, and blocks of devices.
class LentSegments {
 public:
  explicit LentSegments(const memory::LendingPool* pool) : pool_(pool) {}

  // Passes the segment through the socket unless that was done. False: the socket is full or the
  // connection gone, the segment is gone, or `most` segments have been passed.
  bool pass(int socket, std::uint64_t number, std::size_t most);
  // The peer receives arrays on the device. Throws Exception{wire} if it has said so of too many.
  void peer_receives(const Uid& device);
  void peer_refuses(const Uid& device) { devices_.erase(device); }
  bool may_lend_of(int device) const;
  bool changed() const { return retired() != seen_; }
  // Reports retired segments to the peer; those that do not fit into the socket follow later.
  void tell_retired(int socket);

 private:
  bool pass_block(int socket, std::uint64_t number) const;
  bool is_there(std::uint64_t number) const;
  std::uint64_t retired() const;

  const memory::LendingPool* pool_;
  std::uint64_t seen_ = 0;  // of retired()
  std::set<std::uint64_t> passed_;
  std::set<Uid> devices_;  // on which the peer receives
};

// The segments that the peer has passed to this process. Borrowed buffers keep their segment
// mapped.
class BorrowedSegments {
 public:
  // Throws Exception{wire} if it is no segment or its number is taken.
  void add(std::uint64_t number, Descriptor descriptor);
  // A block of a device. Throws Exception{wire} if its number is taken or nothing is received on
  // the device.
  void add_block(std::uint64_t number, const Uid& device, std::uint64_t bytes,
                 Descriptor descriptor);
  // Throws Exception{wire} if the number is unknown.
  void remove(std::uint64_t number);
  bool knows(std::uint64_t number) const { return segments_.contains(number); }
  // Throws Exception{wire} if the place is not within a segment of the peer. Another exception: a
  // block cannot be mapped here, and the peer is told to lend none of that device any more.
  Buffer at(const wire::LoanPlace& place, int socket);
  void clear() { segments_.clear(); }
  // Tells the peer on which devices arrays are received, if that has changed.
  void tell_devices(int socket);

 private:
  static constexpr std::size_t kMaxSegments = 16384;

  // A block is mapped by its first loan.
  struct SharedBlock {
    int device = 0;
    std::uint64_t bytes = 0;
    Descriptor descriptor;
    std::shared_ptr<const device::Block> block;
  };
  using Segment = std::variant<std::shared_ptr<memory::BorrowedSegment>, SharedBlock>;

  void insert(std::uint64_t number, Segment segment);
  static Buffer buffer(std::shared_ptr<memory::BorrowedSegment>& segment,
                       const wire::LoanPlace& place);
  static Buffer buffer(SharedBlock& shared, const wire::LoanPlace& place);
  static void map(SharedBlock& shared, int socket);

  std::unordered_map<std::uint64_t, Segment> segments_;
  std::uint64_t told_ = 0;  // devices, as bits
};

}  // namespace moolink::transport::shm
