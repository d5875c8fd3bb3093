#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace moolink {

// How many bytes of a buffer have been written, from its beginning, by a thread that still writes
// the rest.
class Progress {
 public:
  void reach(std::uint64_t bytes) { bytes_.store(bytes, std::memory_order_release); }
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_acquire); }

 private:
  std::atomic<std::uint64_t> bytes_{0};
};

// Of several equally long inputs: ranges of buffers, which begin at `offset` in each.
struct Written {
  std::vector<std::shared_ptr<const Progress>> buffers;  // that are still being written
  std::uint64_t offset = 0;

  // Whether all inputs are written up to there.
  bool reaches(std::uint64_t end) const {
    return std::ranges::all_of(
        buffers, [&](const auto& progress) { return progress->bytes() >= offset + end; });
  }
};

}  // namespace moolink
