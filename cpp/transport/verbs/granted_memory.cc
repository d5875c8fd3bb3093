#include "transport/verbs/granted_memory.h"

#include <utility>

namespace moolink::transport::verbs {

std::optional<Grant> GrantedMemory::allocate(std::size_t bytes) {
  std::optional<Grant> grant = pool_->allocate(bytes);
  deregister_retired();
  if (!grant) return std::nullopt;
  Registered& lies_in = segments_[grant->place.segment];
  if (!lies_in.region) {
    lies_in.segment = pool_->segment(grant->place.segment);
    lies_in.segment->close_descriptor();
    lies_in.region = device_.register_memory(lies_in.segment->data(), lies_in.segment->size(),
                                             IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  if (!lies_in.region) return std::nullopt;
  // The peer names the memory by its key and address.
  grant->place.segment = lies_in.region.remote_key();
  grant->place.offset = reinterpret_cast<std::uintptr_t>(grant->memory.data());
  return grant;
}

void GrantedMemory::deregister_retired() {
  const std::uint64_t retired = pool_->retired();
  if (std::exchange(retired_, retired) == retired) return;
  std::erase_if(segments_,
                [&](const auto& entry) { return pool_->segment(entry.first) == nullptr; });
}

bool GrantedMemory::retire_idle() {
  const bool again = pool_->retire_idle();
  deregister_retired();
  return again;
}

void GrantedMemory::revoke() {
  pool_->close();
  segments_.clear();
}

}  // namespace moolink::transport::verbs
