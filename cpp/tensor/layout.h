#pragma once

// Shapes, strides and the copy of a strided tensor into compact memory.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace moolink::tensor {

inline constexpr std::size_t kMaxDimensions = 64;  // numpy's limit, the greatest of the frameworks'

// Shape counts elements, strides count elements too (may be negative or zero).
using Shape = std::vector<std::int64_t>;

// DLDeviceType and index of dlpack.h.
struct Device {
  std::int32_t type = 1;
  std::int32_t index = 0;

  bool is_cpu() const { return type == 1; }
  std::string name() const;  // "cpu", "cuda:0"
};

// Row-major without gaps; strides of dimensions of size 1, and of empty tensors, do not matter.
bool is_contiguous(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides);

// A tensor in place, by reference.
struct TensorRef {
  std::byte* data = nullptr;
  DType dtype = DType::uint8;
  Shape shape;
  Shape strides;
  Device device;
  bool read_only = false;

  bool is_contiguous() const { return tensor::is_contiguous(shape, strides); }
};

// Product of the dimensions. Empty: more than 64 dimensions, a negative one, or a product of the
// non-zero ones that does not fit 63 bits (which numpy refuses even when another one is zero).
std::optional<std::uint64_t> element_count(std::span<const std::int64_t> shape);
// The same, times the bytes of an element.
std::optional<std::uint64_t> byte_size(std::size_t item_size, std::span<const std::int64_t> shape);

Shape contiguous_strides(std::span<const std::int64_t> shape);

// Copies the elements at `data` in row-major order to `out`, which has room for all of them.
// Strides count units of `item_size` bytes.
void gather(const std::byte* data, std::size_t item_size, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> strides, std::byte* out);

std::string shape_text(std::span<const std::int64_t> shape);                // "(3, 4)"
std::string layout_text(DType dtype, std::span<const std::int64_t> shape);  // "float32 (3, 4)"

}  // namespace moolink::tensor
