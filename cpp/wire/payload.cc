#include "wire/payload.h"

#include <cstring>

namespace moolink::wire {

Payload private_copy(const Payload& payload, Allocator& allocator) {
  Payload copy{payload.body, {}};
  copy.parts.reserve(payload.parts.size());
  for (const Buffer& part : payload.parts) {
    const MutableBuffer memory = allocator.allocate(part.size());
    if (!part.empty()) std::memcpy(memory.data(), part.data(), part.size());
    copy.parts.emplace_back(memory);
  }
  return copy;
}

}  // namespace moolink::wire
