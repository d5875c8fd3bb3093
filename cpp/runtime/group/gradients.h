#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/group/bucket_layout.h"
#include "tensor/dtype.h"

namespace moolink::runtime {

// The passes over gradients that an accumulator makes in its user's thread, each once over the
// memory, for types that can be averaged: float16, bfloat16, float32, float64 and complex ones.

// A gradient without gaps, and its place in the bucket. Null: there is none, which counts as zeros.
struct Gradient {
  std::byte* data = nullptr;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;  // bytes
};

// bucket[offset ...] = gradient * factor; the gradients are zeroed then if `clear`. Returns whether
// all of their elements are finite.
bool gather(tensor::DType dtype, const std::vector<Gradient>& gradients, double factor, bool clear,
            std::byte* bucket);

// The norm of a bucket as one vector: infinite or NaN if an element is. Its bits depend on nothing
// but the bucket, so that every member decides alike.
double norm(const BucketLayout& layout, const std::byte* bucket);

// bucket *= factor, with the same bits everywhere.
void scale(const BucketLayout& layout, double factor, std::byte* bucket);

}  // namespace moolink::runtime
