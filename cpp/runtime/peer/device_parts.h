#pragma once

#include "base/buffer.h"
#include "wire/frame.h"

namespace moolink::runtime {

// Copies bytes from a CUDA device's memory to the host's, for a path that cannot read them there.
// Waits for the device; other bytes cost only a look-up of their owner. Throws Exception{error}.
void bring_to_host(Buffer& bytes, Allocator& allocator);
void bring_to_host(wire::Frame& frame, Allocator& allocator);

}  // namespace moolink::runtime
