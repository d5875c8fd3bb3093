#pragma once

#include "base/buffer.h"
#include "wire/frame.h"

namespace moolink::runtime {

// What lies in a CUDA device's memory comes to the host's: for a path that cannot read it there.
// Waits for the device; other bytes cost a look at their owner. Throws Exception{error}.
void bring_to_host(Buffer& bytes, Allocator& allocator);
void bring_to_host(wire::Frame& frame, Allocator& allocator);

}  // namespace moolink::runtime
