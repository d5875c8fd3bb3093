#include "tensor/layout.h"

#include <cstring>
#include <limits>

namespace moolink::tensor {
namespace {

struct Dimension {
  std::int64_t size;
  std::int64_t stride;  // bytes
};

// The fewest dimensions that describe the same walk: ones of size 1 are dropped, and neighbours
// that follow each other without a gap are merged.
std::vector<Dimension> collapse(std::size_t item_size, std::span<const std::int64_t> shape,
                                std::span<const std::int64_t> strides) {
  std::vector<Dimension> dimensions;
  const auto item = static_cast<std::int64_t>(item_size);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 1) continue;
    const Dimension next{shape[i], strides[i] * item};
    if (!dimensions.empty() && dimensions.back().stride == next.size * next.stride) {
      dimensions.back() = {dimensions.back().size * next.size, next.stride};
    } else {
      dimensions.push_back(next);
    }
  }
  return dimensions;
}

template <std::size_t kItem>
void copy_row(const std::byte* from, const Dimension& row, std::byte* to) {
  for (std::int64_t i = 0; i < row.size; ++i) {
    std::memcpy(to, from, kItem);  // of constant size: one load and one store
    from += row.stride;
    to += kItem;
  }
}

void copy_row(const std::byte* from, const Dimension& row, std::size_t item, std::byte* to) {
  if (row.stride == static_cast<std::int64_t>(item)) {
    std::memcpy(to, from, static_cast<std::size_t>(row.size) * item);
    return;
  }
  switch (item) {
    case 1:
      return copy_row<1>(from, row, to);
    case 2:
      return copy_row<2>(from, row, to);
    case 4:
      return copy_row<4>(from, row, to);
    case 8:
      return copy_row<8>(from, row, to);
    case 16:
      return copy_row<16>(from, row, to);
    default:
      for (std::int64_t i = 0; i < row.size; ++i) {
        std::memcpy(to + i * static_cast<std::int64_t>(item), from + i * row.stride, item);
      }
  }
}

}  // namespace

std::string Device::name() const {
  switch (type) {
    case 1:
      return "cpu";
    case 2:
      return "cuda:" + std::to_string(index);
    case 3:
      return "cuda_host";
    case 10:
      return "rocm:" + std::to_string(index);
    case 13:
      return "cuda_managed:" + std::to_string(index);
    default:
      return "dlpack device " + std::to_string(type) + ":" + std::to_string(index);
  }
}

std::optional<std::uint64_t> element_count(std::span<const std::int64_t> shape) {
  return byte_size(1, shape);
}

std::optional<std::uint64_t> byte_size(std::size_t item_size, std::span<const std::int64_t> shape) {
  if (shape.size() > kMaxDimensions) return std::nullopt;
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::uint64_t bytes = item_size;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
      continue;
    }
    if (bytes > kMost / static_cast<std::uint64_t>(size)) return std::nullopt;
    bytes *= static_cast<std::uint64_t>(size);
  }
  return empty ? 0 : bytes;
}

Shape contiguous_strides(std::span<const std::int64_t> shape) {
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    if (shape[i] > 1) stride *= shape[i];
  }
  return strides;
}

bool is_contiguous(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  std::int64_t expected = 1;
  bool compact = true;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] == 1) continue;
    compact = compact && strides[i] == expected;
    expected *= shape[i];
  }
  return compact;
}

void gather(const std::byte* data, std::size_t item_size, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> strides, std::byte* out) {
  for (const std::int64_t size : shape) {
    if (size == 0) return;
  }
  std::vector<Dimension> dimensions = collapse(item_size, shape, strides);
  if (dimensions.empty()) {
    std::memcpy(out, data, item_size);
    return;
  }
  const Dimension row = dimensions.back();
  dimensions.pop_back();
  const std::size_t row_bytes = static_cast<std::size_t>(row.size) * item_size;
  std::vector<std::int64_t> index(dimensions.size(), 0);
  while (true) {
    copy_row(data, row, item_size, out);
    out += row_bytes;
    // Counts up the outer dimensions, last first, like an odometer.
    std::size_t i = dimensions.size();
    while (i > 0 && ++index[i - 1] == dimensions[i - 1].size) {
      data -= (dimensions[i - 1].size - 1) * dimensions[i - 1].stride;
      index[--i] = 0;
    }
    if (i == 0) return;
    data += dimensions[i - 1].stride;
  }
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string layout_text(DType dtype, std::span<const std::int64_t> shape) {
  return std::string(dtype_name(dtype)) + " " + shape_text(shape);
}

}  // namespace moolink::tensor
