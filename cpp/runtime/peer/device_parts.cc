#include "runtime/peer/device_parts.h"

#include "device/block.h"

namespace moolink::runtime {

void bring_to_host(Buffer& bytes, Allocator& allocator) {
  if (device::block_of(bytes) != nullptr) bytes = device::copy_to_host(bytes, allocator);
}

void bring_to_host(wire::Frame& frame, Allocator& allocator) {
  for (Buffer& bytes : frame.payload) bring_to_host(bytes, allocator);
}

}  // namespace moolink::runtime
