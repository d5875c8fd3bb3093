#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor/dtype.h"

namespace moolink::runtime {

// Elements of one dtype; sections begin at multiples of 64 bytes within the bucket.
struct BucketSection {
  tensor::DType dtype;
  std::uint64_t count;

  std::size_t bytes() const { return count * tensor::item_size(dtype); }
};

// The positions of the sections in an accumulator's flat bucket of gradients.
struct BucketLayout {
  explicit BucketLayout(std::vector<BucketSection> parts);

  std::vector<BucketSection> sections;
  std::vector<std::size_t> offsets;  // of the sections, bytes
  std::size_t bytes = 0;             // of the whole bucket
};

}  // namespace moolink::runtime
