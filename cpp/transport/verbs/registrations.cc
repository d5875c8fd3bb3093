#include "transport/verbs/registrations.h"

#include <algorithm>
#include <utility>

namespace moolink::transport::verbs {

std::shared_ptr<const Region> Registrations::of(const Buffer& bytes) {
  if (bytes.owner() == nullptr) return nullptr;
  drop_dead();
  const auto covers = [&](const Entry& entry) {
    const bool same_owner =
        !entry.owner.owner_before(bytes.owner()) && !bytes.owner().owner_before(entry.owner);
    return same_owner && entry.begin <= bytes.data() &&
           bytes.data() + bytes.size() <= entry.begin + entry.size;
  };
  const auto known = std::find_if(entries_.begin(), entries_.end(), covers);
  if (known != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, known);
    return entries_.front().region;
  }
  drop_unused(kMost - 1, kMostBytes - std::min(kMostBytes, bytes.size()));
  // Only read: the device needs no right to write.
  auto* address = const_cast<std::byte*>(bytes.data());
  Region region = device_.register_memory(address, bytes.size(), 0);
  if (!region) {
    drop_unused(0, 0);
    region = device_.register_memory(address, bytes.size(), 0);
  }
  if (!region) return nullptr;
  auto shared = std::make_shared<const Region>(std::move(region));
  entries_.push_front({bytes.owner(), bytes.data(), bytes.size(), shared});
  bytes_ += bytes.size();
  return shared;
}

void Registrations::drop_dead() {
  std::erase_if(entries_, [this](const Entry& entry) {
    if (!entry.owner.expired()) return false;
    bytes_ -= entry.size;
    return true;
  });
}

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
