#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/round_up.h"
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
  explicit BucketLayout(std::vector<BucketSection> parts) : sections(std::move(parts)) {
    for (const BucketSection& section : sections) {
      offsets.push_back(round_up(bytes, 64));
      bytes = offsets.back() + section.bytes();
    }
  }

  // How many of the first sections fill exactly this many bytes; 0: none do.
  std::size_t sections_in(std::size_t size) const {
    for (std::size_t i = 0; i < sections.size(); ++i) {
      if (offsets[i] + sections[i].bytes() == size) return i + 1;
    }
    return 0;
  }

  std::vector<BucketSection> sections;
  std::vector<std::size_t> offsets;  // of the sections, bytes
  std::size_t bytes = 0;             // of the whole bucket
};

// An accumulator's passes over gradients, in its user's thread; each reads the memory once.

// Whether a bucket may hold this type: float32, float64 or complex. The adapters convert float16
// and bfloat16 to float32.
bool are_averaged(tensor::DType dtype);

// A gradient without gaps, and its place in the bucket. Null: no gradient, which counts as zeros.
struct Gradient {
  std::byte* data = nullptr;
  std::uint64_t count = 0;
  std::uint64_t offset = 0;  // bytes
};

// bucket[offset ...] = gradient * factor; then, if `clear`, zeroes the gradients outside the
// bucket. A gradient may lie at its place in the bucket. Returns whether all elements are finite.
bool gather(tensor::DType dtype, const std::vector<Gradient>& gradients, double factor, bool clear,
            std::span<std::byte> bucket);

// The norm of a bucket, or of its first sections, as one vector: infinite or NaN if an element is.
// Its bits depend only on the bucket, so that all members decide alike.
double norm(const BucketLayout& layout, std::span<const std::byte> bucket);

// Multiplies a bucket, or its first sections, by `factor`, with the same bits on every machine.
void scale(const BucketLayout& layout, double factor, std::span<std::byte> bucket);

}  // namespace moolink::runtime
