#pragma once

// Shared by the files with arithmetic on whole tensors; include it last, and in no header. The
// compiler makes one copy of each kernel for every instruction set; the loader chooses one.
// Sanitizers and clang before 17 do not support the resolvers for that. Everything is inlined: GCC
// compiles lambdas without the options below and then calls them for each element.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__clang__) && __clang_major__ >= 17
#if !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer) && \
    !__has_feature(memory_sanitizer)
#define MOOLINK_CLANG_CLONES
#endif
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define MOOLINK_CLONES __attribute__((flatten, target_clones("default", "avx2", "avx512f")))
#elif defined(__x86_64__) && defined(__gnu_linux__) && defined(MOOLINK_CLANG_CLONES)
#define MOOLINK_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MOOLINK_CLONES
#endif
#define MOOLINK_INLINE inline __attribute__((always_inline))

// Before a loop whose output may be one of its inputs, element for element.
#if defined(__clang__)
#define MOOLINK_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define MOOLINK_ELEMENTWISE _Pragma("GCC ivdep")
#endif

#if defined(__GNUC__) && !defined(__clang__)
// Loops are vectorized in every build. The code does not read the floating-point exception flags,
// for which selects would stay branches. Values are the same either way.
#pragma GCC optimize("O3,no-trapping-math,no-loop-unroll-and-jam,no-loop-interchange")
#endif

namespace moolink::collective {

// An element of a message, at any address.
template <class T>
struct Packed {
  std::byte bytes[sizeof(T)];
  MOOLINK_INLINE T get() const {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  MOOLINK_INLINE void set(T value) { std::memcpy(bytes, &value, sizeof value); }
};

MOOLINK_INLINE std::uint32_t to_bits(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}
MOOLINK_INLINE float from_bits(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The bits of a float16 or bfloat16 are in the lower half of a 32-bit integer, so that all vector
// lanes are equally wide.
MOOLINK_INLINE float widen_half(std::uint32_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  // Shifted into place the exponent is 112 too small; the product is exact, subnormals included.
  const float scaled = from_bits(magnitude << 13) * 0x1p112f;
  const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  const std::uint32_t sign = (half & 0x8000u) << 16;
  return from_bits(to_bits(scaled) | special | sign);
}

MOOLINK_INLINE std::uint32_t narrow_half(float value) {
  const auto bits = to_bits(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves its multiples of 2^-24 in the mantissa.
  const std::uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const std::uint32_t special =
      magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  std::uint32_t result = magnitude < 0x38800000u ? tiny : normal;
  result = magnitude >= 0x47800000u ? special : result;
  return result | ((bits >> 16) & 0x8000u);
}

MOOLINK_INLINE float widen_bfloat16(std::uint32_t half) { return from_bits(half << 16); }

MOOLINK_INLINE std::uint32_t narrow_bfloat16(float value) {
  const std::uint32_t bits = to_bits(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const std::uint32_t quiet_nan = bits | 0x400000u;
  return (value != value ? quiet_nan : rounded) >> 16;  // NOLINT(misc-redundant-expression)
}

}  // namespace moolink::collective
