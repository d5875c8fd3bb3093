#include "transport/verbs/registrations.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "device/block.h"

namespace moolink::transport::verbs {

std::shared_ptr<const Region> Registrations::of(const Buffer& bytes) {
  const std::shared_ptr<const device::Block> block = device::block_of(bytes);
  const memory::Home home = block == nullptr ? memory::home_of(bytes)
                                             : memory::Home{block, {block->data(), block->bytes()}};
  if (home.lives == nullptr) return nullptr;
  drop_dead();
  const auto covers = [&](const Entry& entry) {
    const bool same =
        !entry.lives.owner_before(home.lives) && !home.lives.owner_before(entry.lives);
    return same && entry.begin <= bytes.data() &&
           bytes.data() + bytes.size() <= entry.begin + entry.size;
  };
  const auto known = std::find_if(entries_.begin(), entries_.end(), covers);
  if (known != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, known);
    return entries_.front().region;
  }
  if (block != nullptr && !refuses_devices_.empty()) return nullptr;
  const std::size_t size = home.memory.size();
  drop_unused(kMost - 1, kMostBytes - std::min(kMostBytes, size));
  Region region = make(home, block.get());
  if (!region) return nullptr;
  auto shared = std::make_shared<const Region>(std::move(region));
  entries_.push_front({home.lives, home.memory.data(), size, shared});
  bytes_ += size;
  return shared;
}

// Only for reading: the device needs no right to write.
Region Registrations::make(const memory::Home& home, const device::Block* block) {
  if (block == nullptr) {
    auto* address = const_cast<std::byte*>(home.memory.data());
    return registrar_.register_memory(address, home.memory.size(), 0);
  }
  try {
    return registrar_.register_block(*block, 0);
  } catch (const Exception& e) {
    refuses_devices_ = e.error().message;
    return {};
  }
}

void Registrations::drop_dead() {
  std::erase_if(entries_, [this](const Entry& entry) {
    if (!entry.lives.expired()) return false;
    bytes_ -= entry.size;
    return true;
  });
}

void Registrations::drop_unused() { drop_unused(0, 0); }

void Registrations::drop_unused(std::size_t most, std::size_t most_bytes) {
  for (auto at = entries_.end(); at != entries_.begin();) {
    if (entries_.size() <= most && bytes_ <= most_bytes) return;
    --at;
    if (at->region.use_count() > 1) continue;
    bytes_ -= at->size;
    at = entries_.erase(at);
  }
}

}  // namespace moolink::transport::verbs
