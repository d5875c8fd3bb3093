#include "wire/payload.h"

namespace moolink::wire {

Payload private_copy(const Payload& payload, Allocator& allocator) {
  Payload copy{payload.body, {}};
  copy.parts.reserve(payload.parts.size());
  for (const Buffer& part : payload.parts) {
    copy.parts.push_back(moolink::private_copy(part, allocator));
  }
  copy.from_guest = payload.from_guest;
  return copy;
}

}  // namespace moolink::wire
