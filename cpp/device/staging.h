#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "base/at_fork.h"

namespace moolink::device {

struct StagingOptions {
  std::size_t slot_bytes = std::size_t{4} << 20;
  std::size_t most_slots = 16;
};

// Pinned host memory for transfers from or to a device: the driver copies other memory through a
// buffer of its own, and blocks. Slots are made when first needed, up to a bound, and reused.
class Staging {
 public:
  using Allocate = std::function<std::byte*(std::size_t bytes)>;  // null: there is none

  explicit Staging(StagingOptions options, Allocate allocate)
      : options_(options), allocate_(std::move(allocate)) {}

  std::size_t slot_bytes() const { return options_.slot_bytes; }
  // A free slot, or a new one; null: there is none.
  std::byte* try_take();
  // The same, but waits for a returned slot if all are in use. Null: not one could be made.
  std::byte* take();
  void give_back(std::byte* slot);
  std::size_t pinned_bytes() const { return slots_made_ * options_.slot_bytes; }

 private:
  std::byte* take_free();  // with mutex_ held

  const StagingOptions options_;
  const Allocate allocate_;
  std::mutex mutex_;
  HeldOverForks over_forks_{mutex_};
  std::condition_variable returned_;
  std::vector<std::byte*> free_;
  std::atomic<std::size_t> slots_made_{0};
};

}  // namespace moolink::device
