#include "transport/grant_pool.h"

#include <utility>

#include "base/error.h"

namespace moolink::transport {

std::optional<Grant> GrantPool::allocate(std::size_t bytes) {
  if (bytes > kLargestBlock) return std::nullopt;
  try {
    Block block = take(bytes);
    return Grant{{++last_grant_, block.place.segment, block.place.offset, bytes},
                 std::move(block.memory)};
  } catch (const Exception&) {
    return std::nullopt;
  }
}

}  // namespace moolink::transport
