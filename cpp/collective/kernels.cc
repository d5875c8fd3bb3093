#include "collective/kernels.h"

#include <algorithm>
#include <bit>
#include <complex>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

// One copy of each kernel for every instruction set, chosen when the library is loaded. Sanitizers
// and clang before 14 cannot have the resolvers that this needs.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define MOOLINK_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MOOLINK_CLONES
#endif
#define MOOLINK_INLINE inline __attribute__((always_inline))

namespace moolink::collective {
namespace {

using tensor::DType;

// IEEE 754 arithmetic for the time of one reduction: nothing flushed to zero, round to nearest.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FloatMode() { _mm_setcsr(saved_); }
#else
  FloatMode() = default;
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, FTZ and DAZ off
  unsigned saved_;
#endif
};

MOOLINK_INLINE float widen_half(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  // Shifted into place the exponent is 112 too small; the product is exact, subnormals included.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special | sign);
}

MOOLINK_INLINE std::uint16_t narrow_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves its multiples of 2^-24 in the mantissa.
  const std::uint32_t tiny =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const std::uint32_t special =
      magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  std::uint32_t result = magnitude < 0x38800000u ? tiny : normal;
  result = magnitude >= 0x47800000u ? special : result;
  return static_cast<std::uint16_t>(result | ((bits >> 16) & 0x8000u));
}

MOOLINK_INLINE float widen_bfloat16(std::uint16_t half) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

MOOLINK_INLINE std::uint16_t narrow_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// How a stored element becomes what is computed with, and back.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static MOOLINK_INLINE Value load(Stored stored) { return stored; }
  static MOOLINK_INLINE Stored store(Value value) { return value; }
};
struct Half {
  using Stored = std::uint16_t;
  using Value = float;
  static MOOLINK_INLINE Value load(Stored stored) { return widen_half(stored); }
  static MOOLINK_INLINE Stored store(Value value) { return narrow_half(value); }
};
struct Bfloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static MOOLINK_INLINE Value load(Stored stored) { return widen_bfloat16(stored); }
  static MOOLINK_INLINE Stored store(Value value) { return narrow_bfloat16(value); }
};

template <class T>
struct IsComplex : std::false_type {};
template <class T>
struct IsComplex<std::complex<T>> : std::true_type {};

// Signed overflow is undefined; the same bits come out of unsigned arithmetic, which wraps.
template <class T, class Function>
MOOLINK_INLINE T wrapping(T a, T b, Function function) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return static_cast<T>(function(static_cast<Wide>(a), static_cast<Wide>(b)));
  } else {
    return function(a, b);
  }
}

template <class T>
MOOLINK_INLINE T multiply(T a, T b) {
  if constexpr (IsComplex<T>::value) {  // without the library's detour for infinities
    return T(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
  } else {
    return wrapping(a, b, [](auto x, auto y) { return x * y; });
  }
}

template <ReduceOp op, class T>
MOOLINK_INLINE T combine(T a, T b) {
  if constexpr (op == ReduceOp::sum || op == ReduceOp::mean) {
    return wrapping(a, b, [](auto x, auto y) { return x + y; });
  } else if constexpr (op == ReduceOp::prod) {
    return multiply(a, b);
  } else if constexpr (IsComplex<T>::value) {
    return a;  // refused before
  } else if constexpr (op == ReduceOp::min) {
    return (b < a || b != b) ? b : a;  // NOLINT(misc-redundant-expression): NaN differs from itself
  } else if constexpr (op == ReduceOp::max) {
    return (b > a || b != b) ? b : a;  // NOLINT(misc-redundant-expression)
  } else if constexpr (!std::is_integral_v<T>) {
    return a;  // refused before
  } else if constexpr (op == ReduceOp::bit_and) {
    return static_cast<T>(a & b);
  } else if constexpr (op == ReduceOp::bit_or) {
    return static_cast<T>(a | b);
  } else {
    return static_cast<T>(a ^ b);
  }
}

template <class T>
MOOLINK_INLINE T divide(T value, double divisor) {
  if constexpr (std::is_integral_v<T>) {
    return value;
  } else if constexpr (IsComplex<T>::value) {
    using Part = typename T::value_type;
    const Part by = static_cast<Part>(divisor);
    return T(value.real() / by, value.imag() / by);
  } else {
    return value / static_cast<T>(divisor);
  }
}

// A block is summed over all inputs while it is in the first-level cache.
template <class Element, ReduceOp op>
MOOLINK_INLINE void reduce(const SumTask& task) {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  constexpr std::size_t kBlock = 1024;
  Value values[kBlock];
  const std::size_t count = task.output.size() / sizeof(Stored);
  auto* out = reinterpret_cast<Stored*>(task.output.data());
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    const auto* first = reinterpret_cast<const Stored*>(task.inputs[0].data()) + begin;
    for (std::size_t i = 0; i < size; ++i) values[i] = Element::load(first[i]);
    for (std::size_t n = 1; n < task.inputs.size(); ++n) {
      const auto* next = reinterpret_cast<const Stored*>(task.inputs[n].data()) + begin;
      for (std::size_t i = 0; i < size; ++i) {
        values[i] = combine<op>(values[i], Element::load(next[i]));
      }
    }
    if (task.divisor != 1) {
      for (std::size_t i = 0; i < size; ++i) values[i] = divide(values[i], task.divisor);
    }
    for (std::size_t i = 0; i < size; ++i) out[begin + i] = Element::store(values[i]);
  }
}

template <class Element>
MOOLINK_INLINE void reduce_by_op(const SumTask& task) {
  switch (task.op) {
    case ReduceOp::sum:
    case ReduceOp::mean:
      return reduce<Element, ReduceOp::sum>(task);
    case ReduceOp::min:
      return reduce<Element, ReduceOp::min>(task);
    case ReduceOp::max:
      return reduce<Element, ReduceOp::max>(task);
    case ReduceOp::prod:
      return reduce<Element, ReduceOp::prod>(task);
    case ReduceOp::bit_and:
      return reduce<Element, ReduceOp::bit_and>(task);
    case ReduceOp::bit_or:
      return reduce<Element, ReduceOp::bit_or>(task);
    case ReduceOp::bit_xor:
      return reduce<Element, ReduceOp::bit_xor>(task);
  }
}

MOOLINK_CLONES void reduce_int8(const SumTask& task) { reduce_by_op<Plain<std::int8_t>>(task); }
MOOLINK_CLONES void reduce_int16(const SumTask& task) { reduce_by_op<Plain<std::int16_t>>(task); }
MOOLINK_CLONES void reduce_int32(const SumTask& task) { reduce_by_op<Plain<std::int32_t>>(task); }
MOOLINK_CLONES void reduce_int64(const SumTask& task) { reduce_by_op<Plain<std::int64_t>>(task); }
MOOLINK_CLONES void reduce_uint8(const SumTask& task) { reduce_by_op<Plain<std::uint8_t>>(task); }
MOOLINK_CLONES void reduce_uint16(const SumTask& task) { reduce_by_op<Plain<std::uint16_t>>(task); }
MOOLINK_CLONES void reduce_uint32(const SumTask& task) { reduce_by_op<Plain<std::uint32_t>>(task); }
MOOLINK_CLONES void reduce_uint64(const SumTask& task) { reduce_by_op<Plain<std::uint64_t>>(task); }
MOOLINK_CLONES void reduce_float16(const SumTask& task) { reduce_by_op<Half>(task); }
MOOLINK_CLONES void reduce_bfloat16(const SumTask& task) { reduce_by_op<Bfloat16>(task); }
MOOLINK_CLONES void reduce_float32(const SumTask& task) { reduce_by_op<Plain<float>>(task); }
MOOLINK_CLONES void reduce_float64(const SumTask& task) { reduce_by_op<Plain<double>>(task); }
MOOLINK_CLONES void reduce_complex64(const SumTask& task) {
  reduce_by_op<Plain<std::complex<float>>>(task);
}
MOOLINK_CLONES void reduce_complex128(const SumTask& task) {
  reduce_by_op<Plain<std::complex<double>>>(task);
}

// Booleans are bytes of value 0 or 1: "any" is their maximum, "all" their minimum.
void reduce_boolean(SumTask task) {
  if (task.op == ReduceOp::sum) task.op = ReduceOp::max;
  if (task.op == ReduceOp::prod) task.op = ReduceOp::min;
  reduce_uint8(task);
}

}  // namespace

std::string op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::mean:
      return "mean";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    case ReduceOp::prod:
      return "prod";
    case ReduceOp::bit_and:
      return "and";
    case ReduceOp::bit_or:
      return "or";
    case ReduceOp::bit_xor:
      return "xor";
  }
  return "?";
}

bool is_supported(DType dtype, ReduceOp op) {
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
  const bool real = half || dtype == DType::float32 || dtype == DType::float64;
  if (tensor::is_floating(dtype) && !real) return false;
  const bool integer = !real && !tensor::is_complex(dtype);
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::prod:
      return true;
    case ReduceOp::mean:
      return !integer;
    case ReduceOp::min:
    case ReduceOp::max:
      return !tensor::is_complex(dtype);
    case ReduceOp::bit_and:
    case ReduceOp::bit_or:
    case ReduceOp::bit_xor:
      return integer;
  }
  return false;
}

void run(const SumTask& task) {
  if (task.output.empty()) return;
  if (task.inputs.size() == 1 && task.divisor == 1) {
    std::memcpy(task.output.data(), task.inputs[0].data(), task.output.size());
    return;
  }
  const FloatMode mode;
  switch (task.dtype) {
    case DType::boolean:
      return reduce_boolean(task);
    case DType::int8:
      return reduce_int8(task);
    case DType::int16:
      return reduce_int16(task);
    case DType::int32:
      return reduce_int32(task);
    case DType::int64:
      return reduce_int64(task);
    case DType::uint8:
      return reduce_uint8(task);
    case DType::uint16:
      return reduce_uint16(task);
    case DType::uint32:
      return reduce_uint32(task);
    case DType::uint64:
      return reduce_uint64(task);
    case DType::float16:
      return reduce_float16(task);
    case DType::float32:
      return reduce_float32(task);
    case DType::float64:
      return reduce_float64(task);
    case DType::complex64:
      return reduce_complex64(task);
    case DType::complex128:
      return reduce_complex128(task);
    case DType::bfloat16:
      return reduce_bfloat16(task);
    case DType::float8_e4m3fn:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2:
    case DType::float8_e5m2fnuz:
    case DType::float8_e8m0fnu:
      return;  // refused when the operation was started
  }
}

float half_to_float(std::uint16_t half) {
  const FloatMode mode;
  return widen_half(half);
}
std::uint16_t float_to_half(float value) {
  const FloatMode mode;
  return narrow_half(value);
}
float bfloat16_to_float(std::uint16_t half) { return widen_bfloat16(half); }
std::uint16_t float_to_bfloat16(float value) { return narrow_bfloat16(value); }

}  // namespace moolink::collective
