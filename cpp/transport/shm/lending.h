#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "memory/borrowed_segment.h"
#include "memory/lending_pool.h"
#include "wire/path.h"

namespace moolink::transport::shm {

// The segments of this process' lending pool that one peer has received.
class LentSegments {
 public:
  explicit LentSegments(const memory::LendingPool* pool) : pool_(pool) {}

  // Passes the segment through the socket unless that was done. False: the socket is full or the
  // connection gone, the segment is gone, or `most` segments have been passed.
  bool pass(int socket, std::uint64_t number, std::size_t most);
  bool changed() const { return pool_ != nullptr && pool_->retired() != seen_; }
  // Reports retired segments to the peer; those that do not fit into the socket follow later.
  void tell_retired(int socket);

 private:
  const memory::LendingPool* pool_;
  std::uint64_t seen_ = 0;  // of pool_->retired()
  std::set<std::uint64_t> passed_;
};

// The segments that the peer has passed to this process. Borrowed buffers keep their segment
// mapped.
class BorrowedSegments {
 public:
  // Throws Exception{wire} if it is no segment or its number is taken.
  void add(std::uint64_t number, Descriptor descriptor);
  // Throws Exception{wire} if the number is unknown.
  void remove(std::uint64_t number);
  bool knows(std::uint64_t number) const { return segments_.contains(number); }
  // Throws Exception{wire} if the place is not within a segment of the peer.
  Buffer at(const wire::LoanPlace& place);
  void clear() { segments_.clear(); }

 private:
  static constexpr std::size_t kMaxSegments = 16384;

  std::unordered_map<std::uint64_t, std::shared_ptr<memory::BorrowedSegment>> segments_;
};

}  // namespace moolink::transport::shm
