#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <vector>

#include "base/at_fork.h"
#include "device/driver.h"

namespace moolink::device {

struct StagingOptions {
  std::size_t slot_bytes = std::size_t{4} << 20;
  std::size_t most_slots = 16;
};

// Pinned host memory for transfers from or to a device: the driver copies other memory through a
// buffer of its own, and blocks. Slots are made when first needed, up to a bound, and reused.
class Staging {
 public:
  Staging(const Driver& driver, StagingOptions options) : driver_(driver), options_(options) {}

  std::size_t slot_bytes() const { return options_.slot_bytes; }
  // A free slot, or a new one; null: there is none.
  std::byte* try_take() {
    const std::lock_guard lock(mutex_);
    return take_free();
  }
  // The same, but waits for a returned slot if all are in use. Null: not one could be made.
  std::byte* take() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (std::byte* slot = take_free()) return slot;
      if (slots_made_ == 0) return nullptr;
      returned_.wait(lock);
    }
  }
  void give_back(std::byte* slot) {
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(slot);
    }
    returned_.notify_one();
  }
  std::size_t pinned_bytes() const { return slots_made_ * options_.slot_bytes; }

 private:
  std::byte* take_free() {  // with mutex_ held
    if (!free_.empty()) {
      std::byte* slot = free_.back();
      free_.pop_back();
      return slot;
    }
    if (slots_made_ == options_.most_slots) return nullptr;
    void* slot = nullptr;
    if (driver_.host_allocate(&slot, options_.slot_bytes, kHostAllocPortable) != kSuccess) {
      return nullptr;
    }
    ++slots_made_;
    return static_cast<std::byte*>(slot);
  }

  const Driver& driver_;
  const StagingOptions options_;
  std::mutex mutex_;
  HeldOverForks over_forks_{mutex_};
  std::condition_variable returned_;
  std::vector<std::byte*> free_;
  std::atomic<std::size_t> slots_made_{0};
};

}  // namespace moolink::device
