#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/buffer.h"
#include "base/descriptor.h"
#include "memory/segment.h"
#include "wire/path.h"

namespace moolink::transport::shm {

// Copies parts into the grants of one peer, in slices, so that other work is never delayed for
// long.
class GrantFiller {
 public:
  // A segment that the peer passed. Throws Exception{wire} if it is none or its number is taken.
  void add_segment(std::uint64_t number, Descriptor descriptor);
  // Throws Exception{wire} if the number is unknown.
  void retire_segment(std::uint64_t number);
  bool knows(std::uint64_t number) const { return segments_.contains(number); }

  // Throws Exception{wire} if the place is not within a segment of the peer.
  MutableBuffer memory(const wire::GrantPlace& place) const;
  // The same, also if the place is too small.
  void begin(const wire::GrantPlace& place, Buffer bytes);
  bool idle() const { return jobs_.empty(); }
  // Copies the next slice; returns the place that is full now, if any.
  std::optional<wire::GrantPlace> step();
  // Stops copying and unmaps.
  void clear();

 private:
  struct Job {
    MutableBuffer target;
    wire::GrantPlace place;
    Buffer bytes;
    std::size_t done = 0;
  };

  static constexpr std::size_t kSliceBytes = std::size_t{1} << 20;
  static constexpr std::size_t kMaxSegments = 16384;

  std::unordered_map<std::uint64_t, std::shared_ptr<memory::Segment>> segments_;
  std::deque<Job> jobs_;
};

}  // namespace moolink::transport::shm
