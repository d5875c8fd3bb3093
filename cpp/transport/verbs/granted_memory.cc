#include "transport/verbs/granted_memory.h"

#include <utility>

namespace moolink::transport::verbs {

std::optional<Grant> GrantedMemory::allocate(std::size_t bytes) {
  std::optional<GrantPool::Block> block = pool_->allocate(bytes);
  follow_pool();
  if (!block) return std::nullopt;
  Registered& lies_in = segments_.at(block->place.segment);
  if (!lies_in.region) {
    lies_in.region = device_.register_memory(lies_in.segment->data(), lies_in.segment->size(),
                                             IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  }
  if (!lies_in.region) return std::nullopt;
  const auto address = reinterpret_cast<std::uintptr_t>(block->memory.data());
  return Grant{{block->place.grant, lies_in.region.remote_key(), address, bytes},
               std::move(block->memory)};
}

void GrantedMemory::follow_pool() {
  for (GrantPool::Change& change : pool_->take_changes()) {
    if (change.made) {
      change.made->close_descriptor();
      segments_.emplace(change.segment, Registered{std::move(change.made), {}});
    } else {
      segments_.erase(change.segment);
    }
  }
}

bool GrantedMemory::retire_idle() {
  const bool again = pool_->retire_idle();
  follow_pool();
  return again;
}

void GrantedMemory::revoke() {
  pool_->close();
  segments_.clear();
}

}  // namespace moolink::transport::verbs
