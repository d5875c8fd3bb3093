#include "runtime/group/gradients.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "collective/float_mode.h"

namespace moolink::runtime {
namespace {

using tensor::DType;

// The bits of the exponent: all ones in infinities and NaNs.
constexpr std::uint32_t exponent(float) { return 0x7f800000U; }
constexpr std::uint64_t exponent(double) { return 0x7ff0000000000000ULL; }

constexpr std::size_t kBlock = 4096;  // elements: zeroed while they are in the cache

template <class Value>
bool gather_block(const Value* from, Value* to, std::size_t count, Value factor) {
  constexpr auto kExponent = exponent(Value());
  using Bits = decltype(exponent(Value()));
  Bits bad = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<Bits>(from[i]);
    bad |= (bits & kExponent) == kExponent ? 1 : 0;
    to[i] = from[i] * factor;
  }
  return bad == 0;
}

template <class Value>
bool gather_one(const Gradient& gradient, std::size_t count, double factor, bool clear,
                std::byte* bucket) {
  auto* from = reinterpret_cast<Value*>(gradient.data);
  auto* to = reinterpret_cast<Value*>(bucket + gradient.offset);
  const auto by = static_cast<Value>(factor);
  bool finite = true;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    if (!gather_block(from + begin, to + begin, size, by)) finite = false;
    if (clear) std::memset(from + begin, 0, size * sizeof(Value));
  }
  return finite;
}

// In lanes, so that the order of the sum does not depend on the width of a vector register.
template <class Value>
double sum_of_squares(const std::byte* bytes, std::size_t count) {
  constexpr std::size_t kLanes = 16;
  const auto* values = reinterpret_cast<const Value*>(bytes);
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    const double value = values[i];
    lanes[lane] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class Value>
void scale_all(std::byte* bytes, std::size_t count, double factor) {
  auto* values = reinterpret_cast<Value*>(bytes);
  const auto by = static_cast<Value>(factor);
  for (std::size_t i = 0; i < count; ++i) values[i] *= by;
}

// Calls with a value of the elements' type, and how many of them an element of the tensor has.
template <class Visit>
auto with_type(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::float32:
      return visit(float(), 1);
    case DType::float64:
      return visit(double(), 1);
    case DType::complex64:
      return visit(float(), 2);
    case DType::complex128:
      return visit(double(), 2);
    default:
      throw Exception(
          ErrorCode::invalid_argument,
          "gradients of type " + std::string(tensor::dtype_name(dtype)) + " cannot be averaged");
  }
}

// Two parameters may share one gradient, or views of one.
bool have_memory_in_common(const std::vector<Gradient>& gradients, std::size_t element) {
  std::vector<std::pair<const std::byte*, const std::byte*>> spans;
  spans.reserve(gradients.size());
  for (const Gradient& gradient : gradients) {
    if (gradient.data == nullptr || gradient.count == 0) continue;
    spans.emplace_back(gradient.data, gradient.data + gradient.count * element);
  }
  std::ranges::sort(spans);
  return std::ranges::adjacent_find(spans, [](const auto& one, const auto& next) {
           return next.first < one.second;
         }) != spans.end();
}

}  // namespace

bool are_averaged(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float64 || tensor::is_complex(dtype);
}

bool gather(DType dtype, const std::vector<Gradient>& gradients, double factor, bool clear,
            std::span<std::byte> bucket) {
  const auto is_outside = [&](const Gradient& gradient) {
    return gradient.data < bucket.data() || gradient.data >= bucket.data() + bucket.size();
  };
  const collective::FloatMode ieee;
  return with_type(dtype, [&](auto value, std::size_t parts) {
    using Value = decltype(value);
    const std::size_t element = parts * sizeof(Value);
    const bool at_once = clear && !have_memory_in_common(gradients, element);
    bool finite = true;
    // Gradients at their places are scaled last, because other gradients may share their memory.
    for (const bool in_place : {false, true}) {
      for (const Gradient& gradient : gradients) {
        std::byte* place = bucket.data() + gradient.offset;
        if ((gradient.data == place) != in_place) continue;
        if (gradient.data == nullptr) {
          std::memset(place, 0, gradient.count * element);
        } else if (!gather_one<Value>(gradient, gradient.count * parts, factor,
                                      at_once && is_outside(gradient), bucket.data())) {
          finite = false;
        }
      }
    }
    if (!clear || at_once) return finite;
    for (const Gradient& gradient : gradients) {
      if (gradient.data == nullptr || !is_outside(gradient)) continue;
      std::memset(gradient.data, 0, gradient.count * element);
    }
    return finite;
  });
}

double norm(const BucketLayout& layout, std::span<const std::byte> bucket) {
  const collective::FloatMode ieee;
  double sum = 0;
  const std::size_t sections = layout.sections_in(bucket.size());
  for (std::size_t i = 0; i < sections; ++i) {
    const BucketSection& section = layout.sections[i];
    sum += with_type(section.dtype, [&](auto value, std::size_t parts) {
      return sum_of_squares<decltype(value)>(bucket.data() + layout.offsets[i],
                                             section.count * parts);
    });
  }
  return std::sqrt(sum);
}

void scale(const BucketLayout& layout, double factor, std::span<std::byte> bucket) {
  const collective::FloatMode ieee;
  const std::size_t sections = layout.sections_in(bucket.size());
  for (std::size_t i = 0; i < sections; ++i) {
    const BucketSection& section = layout.sections[i];
    with_type(section.dtype, [&](auto value, std::size_t parts) {
      scale_all<decltype(value)>(bucket.data() + layout.offsets[i], section.count * parts, factor);
    });
  }
}

}  // namespace moolink::runtime
