#pragma once

#include <cstddef>
#include <deque>
#include <optional>

#include "base/buffer.h"
#include "wire/path.h"

namespace moolink::transport::shm {

// Copies parts into the grants of one peer, in slices, so that other work is never delayed for
// long.
class GrantFiller {
 public:
  // `target`: the memory of the place. Throws Exception{wire} if `target` is too small.
  void begin(const wire::GrantPlace& place, MutableBuffer target, Buffer bytes);
  bool idle() const { return jobs_.empty(); }
  // Copies the next slice; returns the place that is full now, if any.
  std::optional<wire::GrantPlace> step();
  void clear() { jobs_.clear(); }

 private:
  struct Job {
    MutableBuffer target;
    wire::GrantPlace place;
    Buffer bytes;
    std::size_t done = 0;
  };

  static constexpr std::size_t kSliceBytes = std::size_t{1} << 20;

  std::deque<Job> jobs_;
};

}  // namespace moolink::transport::shm
