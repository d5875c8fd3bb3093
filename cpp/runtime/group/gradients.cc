#include "runtime/group/gradients.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "collective/float_mode.h"
#include "collective/kernels.h"

namespace moolink::runtime {
namespace {

using tensor::DType;

// How elements of each type are read, computed and written. `kExponent` is all ones in non-finite
// values.
template <class Value, class Word, Word exponent>
struct Plain {
  using Stored = Value;
  using Bits = Word;
  using Computed = Value;
  static constexpr Bits kExponent = exponent;
  static Value read(Value stored) { return stored; }
  static Value write(Value value) { return value; }
};
using Float32 = Plain<float, std::uint32_t, 0x7f800000U>;
using Float64 = Plain<double, std::uint64_t, 0x7ff0000000000000ULL>;

template <float (*widen)(std::uint16_t), std::uint16_t (*narrow)(float), std::uint16_t exponent>
struct Half {
  using Stored = std::uint16_t;
  using Bits = std::uint16_t;
  using Computed = float;
  static constexpr Bits kExponent = exponent;
  static float read(Stored stored) { return widen(stored); }
  static Stored write(float value) { return narrow(value); }
};
using Float16 = Half<collective::half_to_float, collective::float_to_half, 0x7c00U>;
using BFloat16 = Half<collective::bfloat16_to_float, collective::float_to_bfloat16, 0x7f80U>;

constexpr std::size_t kBlock = 4096;  // elements: zeroed while they are in the cache

template <class Type>
bool gather_block(const typename Type::Stored* from, typename Type::Stored* to, std::size_t count,
                  typename Type::Computed factor) {
  using Bits = typename Type::Bits;
  Bits bad = 0;
  for (std::size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, from + i, sizeof bits);
    bad |= static_cast<Bits>((bits & Type::kExponent) == Type::kExponent ? 1 : 0);
    to[i] = Type::write(Type::read(from[i]) * factor);
  }
  return bad == 0;
}

template <class Type>
bool gather_one(const Gradient& gradient, std::size_t count, double factor, bool clear,
                std::byte* bucket) {
  using Stored = typename Type::Stored;
  auto* from = reinterpret_cast<Stored*>(gradient.data);
  auto* to = reinterpret_cast<Stored*>(bucket + gradient.offset);
  bool finite = true;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    const auto by = static_cast<typename Type::Computed>(factor);
    if (!gather_block<Type>(from + begin, to + begin, size, by)) finite = false;
    if (clear) std::memset(from + begin, 0, size * sizeof(Stored));
  }
  return finite;
}

// In lanes, so that the order of the sum does not depend on the width of a vector register.
template <class Type>
double sum_of_squares(const std::byte* bytes, std::size_t count) {
  constexpr std::size_t kLanes = 16;
  const auto* values = reinterpret_cast<const typename Type::Stored*>(bytes);
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = Type::read(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    const double value = Type::read(values[i]);
    lanes[lane] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class Type>
void scale_all(std::byte* bytes, std::size_t count, double factor) {
  auto* values = reinterpret_cast<typename Type::Stored*>(bytes);
  const auto by = static_cast<typename Type::Computed>(factor);
  for (std::size_t i = 0; i < count; ++i) values[i] = Type::write(Type::read(values[i]) * by);
}

// Calls with the type of the elements, and how many of them an element of the tensor has.
template <class Visit>
auto with_type(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::float32:
      return visit(Float32(), 1);
    case DType::float64:
      return visit(Float64(), 1);
    case DType::float16:
      return visit(Float16(), 1);
    case DType::bfloat16:
      return visit(BFloat16(), 1);
    case DType::complex64:
      return visit(Float32(), 2);
    case DType::complex128:
      return visit(Float64(), 2);
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

bool gather(DType dtype, const std::vector<Gradient>& gradients, double factor, bool clear,
            std::span<std::byte> bucket) {
  const auto is_outside = [&](const Gradient& gradient) {
    return gradient.data < bucket.data() || gradient.data >= bucket.data() + bucket.size();
  };
  return with_type(dtype, [&](auto type, std::size_t parts) {
    using Type = decltype(type);
    const std::size_t element = parts * sizeof(typename Type::Stored);
    const bool at_once = clear && !have_memory_in_common(gradients, element);
    bool finite = true;
    // Gradients at their places are scaled last, because other gradients may share their memory.
    for (const bool in_place : {false, true}) {
      for (const Gradient& gradient : gradients) {
        std::byte* place = bucket.data() + gradient.offset;
        if ((gradient.data == place) != in_place) continue;
        if (gradient.data == nullptr) {
          std::memset(place, 0, gradient.count * element);
        } else if (!gather_one<Type>(gradient, gradient.count * parts, factor,
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

double norm(const BucketLayout& layout, const std::byte* bucket) {
  const collective::FloatMode ieee;
  double sum = 0;
  for (std::size_t i = 0; i < layout.sections.size(); ++i) {
    const BucketSection& section = layout.sections[i];
    sum += with_type(section.dtype, [&](auto type, std::size_t parts) {
      return sum_of_squares<decltype(type)>(bucket + layout.offsets[i], section.count * parts);
    });
  }
  return std::sqrt(sum);
}

void scale(const BucketLayout& layout, double factor, std::byte* bucket) {
  const collective::FloatMode ieee;
  for (std::size_t i = 0; i < layout.sections.size(); ++i) {
    const BucketSection& section = layout.sections[i];
    with_type(section.dtype, [&](auto type, std::size_t parts) {
      scale_all<decltype(type)>(bucket + layout.offsets[i], section.count * parts, factor);
    });
  }
}

}  // namespace moolink::runtime
