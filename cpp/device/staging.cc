#include "device/staging.h"

namespace moolink::device {

std::byte* Staging::take_free() {
  if (!free_.empty()) {
    std::byte* slot = free_.back();
    free_.pop_back();
    return slot;
  }
  if (slots_made_ == options_.most_slots) return nullptr;
  std::byte* slot = allocate_(options_.slot_bytes);
  if (slot != nullptr) ++slots_made_;
  return slot;
}

std::byte* Staging::try_take() {
  const std::lock_guard lock(mutex_);
  return take_free();
}

std::byte* Staging::take() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (std::byte* slot = take_free()) return slot;
    if (slots_made_ == 0) return nullptr;
    returned_.wait(lock);
  }
}

void Staging::give_back(std::byte* slot) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);
  }
  returned_.notify_one();
}

}  // namespace moolink::device
