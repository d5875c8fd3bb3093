#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace moolink {

// The number of bytes that a thread has written from the beginning of a buffer. The thread is still
// writing the rest.
class Progress {
 public:
  void reach(std::uint64_t bytes) { bytes_.store(bytes, std::memory_order_release); }
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_acquire); }

 private:
  std::atomic<std::uint64_t> bytes_{0};
};

// The progress of several inputs of equal length. Each is a range of a buffer, from `offset`.
struct Written {
  std::vector<std::shared_ptr<const Progress>> buffers;  // those that are still being written
  std::uint64_t offset = 0;

  // Whether all inputs are written up to `end`.
  bool reaches(std::uint64_t end) const {
    return std::ranges::all_of(
        buffers, [&](const auto& progress) { return progress->bytes() >= offset + end; });
  }
};

}  // namespace moolink
