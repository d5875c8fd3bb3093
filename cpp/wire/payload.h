#pragma once

#include <cstddef>
#include <vector>

#include "base/buffer.h"

namespace moolink::wire {

// What a message carries: an encoded value or struct, and the bytes of the tensors it refers to by
// index. Parts are kept apart so that each can be received straight into its final memory.
struct Payload {
  Buffer body;
  std::vector<Buffer> parts;

  std::size_t bytes() const {
    std::size_t total = body.size();
    for (const Buffer& part : parts) total += part.size();
    return total;
  }

  template <class Fields>
  void fields(Fields& f) {
    f(body, parts);
  }
};

// The same bytes in memory of its own: decoding a payload gives its parts away, so what others may
// still read or send is copied first.
Payload private_copy(const Payload& payload, Allocator& allocator);

}  // namespace moolink::wire
