#include "collective/kernels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "collective/float_mode.h"
#include "collective/kernel_target.h"

namespace moolink::collective {
namespace {

using tensor::DType;

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::bit_and || op == ReduceOp::bit_or || op == ReduceOp::bit_xor;
}
bool is_by_order(ReduceOp op) { return op == ReduceOp::min || op == ReduceOp::max; }

bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

// Conversion of a stored element to the computed value, and back.
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
  static MOOLINK_INLINE Value load(std::uint32_t stored) { return widen_half(stored); }
  static MOOLINK_INLINE std::uint32_t store(Value value) { return narrow_half(value); }
};
struct Bfloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static MOOLINK_INLINE Value load(std::uint32_t stored) { return widen_bfloat16(stored); }
  static MOOLINK_INLINE std::uint32_t store(Value value) { return narrow_bfloat16(value); }
};

template <class T>
struct Complex {
  T real;
  T imag;
};
template <class T>
struct IsComplex : std::false_type {};
template <class T>
struct IsComplex<Complex<T>> : std::true_type {};

// The operand of an operator: small types are promoted to int, whose overflow is undefined, and
// unsigned arithmetic wraps.
template <class T>
MOOLINK_INLINE auto operand(T value) {
  if constexpr (std::is_unsigned_v<T>) {
    return static_cast<std::common_type_t<T, unsigned>>(value);
  } else {
    return value;
  }
}

template <class T>
MOOLINK_INLINE T multiply(T a, T b) {
  if constexpr (IsComplex<T>::value) {
    return T{a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  } else {
    return static_cast<T>(operand(a) * operand(b));
  }
}

template <ReduceOp op, class T>
MOOLINK_INLINE T combine(T a, T b) {
  if constexpr (op == ReduceOp::sum || op == ReduceOp::mean) {
    return static_cast<T>(operand(a) + operand(b));
  } else if constexpr (op == ReduceOp::prod) {
    return multiply(a, b);
  } else if constexpr (op == ReduceOp::min) {
    return (b < a || b != b) ? b : a;  // NOLINT(misc-redundant-expression): NaN differs from itself
  } else if constexpr (op == ReduceOp::max) {
    return (b > a || b != b) ? b : a;  // NOLINT(misc-redundant-expression)
  } else if constexpr (op == ReduceOp::bit_and) {
    return static_cast<T>(a & b);
  } else if constexpr (op == ReduceOp::bit_or) {
    return static_cast<T>(a | b);
  } else {
    return static_cast<T>(a ^ b);
  }
}

// A mean is of real numbers: the mean of complex numbers is that of their parts.
template <class T>
MOOLINK_INLINE T divide(T value, double divisor) {
  if constexpr (std::is_floating_point_v<T>) {
    return value / static_cast<T>(divisor);
  } else {
    return value;
  }
}

constexpr std::size_t kBlock = 1024;

// If a minimum overwrites one of its operands, Clang emits a masked store, which takes 20 cycles on
// some processors. So with Clang, the loops read one array and write another, and the two swap
// roles after each input. GCC's loops are faster in place.
#if defined(__clang__)
#define MOOLINK_TWO_PLACES
#endif

// The arrays for the values of a block.
template <class T>
struct Places {
  alignas(64) T first[kBlock];
#if defined(MOOLINK_TWO_PLACES)
  alignas(64) T second[kBlock];
#else
  static constexpr T* second = nullptr;
#endif
};

// Combines the inputs of one block. Returns the array that has the result: `values` or `other`.
template <class Load, ReduceOp op>
MOOLINK_INLINE typename Load::Value* gather(const SumTask& task, std::size_t begin,
                                            std::size_t size,
                                            typename Load::Value* __restrict values,
                                            [[maybe_unused]] typename Load::Value* other) {
  using Stored = Packed<typename Load::Stored>;
  const auto at = [&](std::size_t n) {
    return reinterpret_cast<const Stored*>(task.inputs[n].data()) + begin;
  };
  const Stored* __restrict first = at(0);
  for (std::size_t i = 0; i < size; ++i) values[i] = Load::load(first[i].get());
  for (std::size_t n = 1; n < task.inputs.size(); ++n) {
    const Stored* __restrict next = at(n);
#if defined(MOOLINK_TWO_PLACES)
    MOOLINK_ELEMENTWISE
    for (std::size_t i = 0; i < size; ++i) {
      other[i] = combine<op>(values[i], Load::load(next[i].get()));
    }
    auto* read = values;
    values = other;
    other = read;
#else
    for (std::size_t i = 0; i < size; ++i) {
      values[i] = combine<op>(values[i], Load::load(next[i].get()));
    }
#endif
  }
  return values;
}

// A block is summed over all inputs while it is in the first-level cache: one pass over memory.
// Elements [begin, end).
template <class Load, class Store, ReduceOp op>
MOOLINK_INLINE void reduce_range(const SumTask& task, std::size_t begin, std::size_t end) {
  using Stored = typename Store::Stored;
  using Value = typename Load::Value;
  Places<Value> places;
  const double divisor = task.divisor;  // a copy: for Clang, stores to `out` could change it
  for (; begin < end; begin += kBlock) {
    const std::size_t size = end - begin < kBlock ? end - begin : kBlock;
    const Value* values = gather<Load, op>(task, begin, size, places.first, places.second);
    auto* out = reinterpret_cast<Packed<Stored>*>(task.output.data()) + begin;
    if (divisor != 1) {
      for (std::size_t i = 0; i < size; ++i) {
        out[i].set(static_cast<Stored>(Store::store(divide(values[i], divisor))));
      }
    } else {
      for (std::size_t i = 0; i < size; ++i) {
        out[i].set(static_cast<Stored>(Store::store(values[i])));
      }
    }
  }
}

template <class Load, class Store, ReduceOp op>
MOOLINK_INLINE void reduce(const SumTask& task) {
  using Stored = typename Store::Stored;
  const std::size_t count = task.output.size() / sizeof(Stored);
  if (task.inputs.size() != 2 || task.divisor != 1) {
    return reduce_range<Load, Store, op>(task, 0, count);
  }
  using Given = Packed<typename Load::Stored>;
  const auto* a = reinterpret_cast<const Given*>(task.inputs[0].data());
  const auto* b = reinterpret_cast<const Given*>(task.inputs[1].data());
  auto* out = reinterpret_cast<Packed<Stored>*>(task.output.data());
  MOOLINK_ELEMENTWISE
  for (std::size_t i = 0; i < count; ++i) {
    out[i].set(static_cast<Stored>(
        Store::store(combine<op>(Load::load(a[i].get()), Load::load(b[i].get())))));
  }
}

// Two adjacent halves, in one lane: nothing moves between lanes.
using Pair [[gnu::may_alias, gnu::aligned(1)]] = std::uint32_t;

template <class Element>
MOOLINK_INLINE std::uint32_t store_pair(float low, float high) {
  return Element::store(low) | (Element::store(high) << 16);
}

template <class Element, ReduceOp op>
MOOLINK_INLINE void reduce_pairs(const SumTask& task) {
  Places<float> lows;
  Places<float> highs;
  alignas(64) std::uint32_t packed[kBlock];
  const std::size_t count = task.output.size() / sizeof(std::uint16_t);
  const auto at = [&](std::size_t n, std::size_t begin) {
    return reinterpret_cast<const Pair*>(task.inputs[n].data()) + begin;
  };
  for (std::size_t begin = 0; begin < count / 2; begin += kBlock) {
    const std::size_t size = count / 2 - begin < kBlock ? count / 2 - begin : kBlock;
    Pair* out = reinterpret_cast<Pair*>(task.output.data()) + begin;
    const Pair* first = at(0, begin);
    if (task.inputs.size() == 2 && task.divisor == 1) {
      const Pair* second = at(1, begin);
      MOOLINK_ELEMENTWISE
      for (std::size_t i = 0; i < size; ++i) {
        out[i] = store_pair<Element>(
            combine<op>(Element::load(first[i] & 0xffffu), Element::load(second[i] & 0xffffu)),
            combine<op>(Element::load(first[i] >> 16), Element::load(second[i] >> 16)));
      }
      continue;
    }
    float* low = lows.first;
    float* high = highs.first;
    for (std::size_t i = 0; i < size; ++i) {
      low[i] = Element::load(first[i] & 0xffffu);
      high[i] = Element::load(first[i] >> 16);
    }
    for (std::size_t n = 1; n < task.inputs.size(); ++n) {
      const Pair* __restrict next = at(n, begin);
#if defined(MOOLINK_TWO_PLACES)
      float* other_low = low == lows.first ? lows.second : lows.first;
      float* other_high = high == highs.first ? highs.second : highs.first;
      MOOLINK_ELEMENTWISE
      for (std::size_t i = 0; i < size; ++i) {
        other_low[i] = combine<op>(low[i], Element::load(next[i] & 0xffffu));
        other_high[i] = combine<op>(high[i], Element::load(next[i] >> 16));
      }
      low = other_low;
      high = other_high;
#else
      for (std::size_t i = 0; i < size; ++i) {
        low[i] = combine<op>(low[i], Element::load(next[i] & 0xffffu));
        high[i] = combine<op>(high[i], Element::load(next[i] >> 16));
      }
#endif
    }
    if (task.divisor != 1) {
      for (std::size_t i = 0; i < size; ++i) {
        low[i] = divide(low[i], task.divisor);
        high[i] = divide(high[i], task.divisor);
      }
    }
    for (std::size_t i = 0; i < size; ++i) packed[i] = store_pair<Element>(low[i], high[i]);
    std::memcpy(out, packed, size * sizeof(std::uint32_t));
  }
  reduce_range<Element, Element, op>(task, count / 2 * 2, count);
}

template <class Load, class Store, ReduceOp op>
MOOLINK_INLINE void reduce_one_op(const SumTask& task) {
  if constexpr (std::is_same_v<Load, Store> &&
                !std::is_same_v<Load, Plain<typename Load::Stored>>) {
    reduce_pairs<Load, op>(task);
  } else {
    reduce<Load, Store, op>(task);
  }
}

template <class Load, class Store>
MOOLINK_INLINE void reduce_by_order(const SumTask& task) {
  if (task.op == ReduceOp::min) return reduce_one_op<Load, Store, ReduceOp::min>(task);
  reduce_one_op<Load, Store, ReduceOp::max>(task);
}
template <class Load, class Store>
MOOLINK_INLINE void reduce_by_op(const SumTask& task) {
  if (is_by_order(task.op)) return reduce_by_order<Load, Store>(task);
  if (task.op == ReduceOp::prod) return reduce_one_op<Load, Store, ReduceOp::prod>(task);
  reduce_one_op<Load, Store, ReduceOp::sum>(task);
}

template <class T>
MOOLINK_INLINE void reduce_plain(const SumTask& task) {
  reduce_by_op<Plain<T>, Plain<T>>(task);
}
template <class T>
MOOLINK_INLINE void order_plain(const SumTask& task) {
  reduce_by_order<Plain<T>, Plain<T>>(task);
}

// Bit operations of all integers, byte by byte.
MOOLINK_CLONES void reduce_bits(const SumTask& task) {
  using Byte = Plain<std::uint8_t>;
  if (task.op == ReduceOp::bit_and) return reduce<Byte, Byte, ReduceOp::bit_and>(task);
  if (task.op == ReduceOp::bit_or) return reduce<Byte, Byte, ReduceOp::bit_or>(task);
  reduce<Byte, Byte, ReduceOp::bit_xor>(task);
}

MOOLINK_CLONES void order_int8(const SumTask& task) { order_plain<std::int8_t>(task); }
MOOLINK_CLONES void order_int16(const SumTask& task) { order_plain<std::int16_t>(task); }
MOOLINK_CLONES void order_int32(const SumTask& task) { order_plain<std::int32_t>(task); }
MOOLINK_CLONES void order_int64(const SumTask& task) { order_plain<std::int64_t>(task); }
MOOLINK_CLONES void reduce_uint8(const SumTask& task) { reduce_plain<std::uint8_t>(task); }
MOOLINK_CLONES void reduce_uint16(const SumTask& task) { reduce_plain<std::uint16_t>(task); }
MOOLINK_CLONES void reduce_uint32(const SumTask& task) { reduce_plain<std::uint32_t>(task); }
MOOLINK_CLONES void reduce_uint64(const SumTask& task) { reduce_plain<std::uint64_t>(task); }
MOOLINK_CLONES void reduce_float16(const SumTask& task) { reduce_by_op<Half, Half>(task); }
MOOLINK_CLONES void widen_float16(const SumTask& task) { reduce_by_op<Half, Plain<float>>(task); }
MOOLINK_CLONES void round_float16(const SumTask& task) { reduce_by_op<Plain<float>, Half>(task); }
MOOLINK_CLONES void reduce_bfloat16(const SumTask& task) { reduce_by_op<Bfloat16, Bfloat16>(task); }
MOOLINK_CLONES void widen_bfloat16s(const SumTask& task) {
  reduce_by_op<Bfloat16, Plain<float>>(task);
}
MOOLINK_CLONES void round_bfloat16s(const SumTask& task) {
  reduce_by_op<Plain<float>, Bfloat16>(task);
}
MOOLINK_CLONES void reduce_float32(const SumTask& task) { reduce_plain<float>(task); }
MOOLINK_CLONES void reduce_float64(const SumTask& task) { reduce_plain<double>(task); }
template <class T>
MOOLINK_INLINE void multiply_complex(const SumTask& task) {
  reduce<Plain<Complex<T>>, Plain<Complex<T>>, ReduceOp::prod>(task);
}
MOOLINK_CLONES void multiply_complex64(const SumTask& task) { multiply_complex<float>(task); }
MOOLINK_CLONES void multiply_complex128(const SumTask& task) { multiply_complex<double>(task); }

// Stored halves in or out, or partial sums, which are float32.
void reduce_half(const SumTask& task) {
  const bool is_float16 = task.dtype == DType::float16;
  if (task.partial_inputs && task.partial_output) return reduce_float32(task);
  if (task.partial_inputs) return is_float16 ? round_float16(task) : round_bfloat16s(task);
  if (task.partial_output) return is_float16 ? widen_float16(task) : widen_bfloat16s(task);
  return is_float16 ? reduce_float16(task) : reduce_bfloat16(task);
}

// Booleans are bytes of value 0 or 1: "any" is their maximum, "all" their minimum.
void reduce_boolean(SumTask task) {
  if (is_bitwise(task.op)) return reduce_bits(task);
  if (task.op == ReduceOp::sum) task.op = ReduceOp::max;
  if (task.op == ReduceOp::prod) task.op = ReduceOp::min;
  reduce_uint8(task);
}

// For two's complement numbers only min and max depend on the sign.
using Kernel = void (*)(const SumTask&);
void reduce_unsigned(const SumTask& task, Kernel arithmetic) {
  is_bitwise(task.op) ? reduce_bits(task) : arithmetic(task);
}
void reduce_signed(const SumTask& task, Kernel order, Kernel arithmetic) {
  is_by_order(task.op) ? order(task) : reduce_unsigned(task, arithmetic);
}

template <class Bits>
MOOLINK_INLINE void replace_nans(MutableBuffer output, Bits magnitude, Bits infinity, Bits nan) {
  auto* values = reinterpret_cast<Packed<Bits>*>(output.data());
  const std::size_t count = output.size() / sizeof(Bits);
  for (std::size_t i = 0; i < count; ++i) {
    const Bits bits = values[i].get();
    values[i].set(static_cast<Bits>(bits & magnitude) > infinity ? nan : bits);
  }
}

void canonicalise(DType dtype, const MutableBuffer& output) {
  if (dtype == DType::float16) {
    replace_nans<std::uint16_t>(output, 0x7fff, 0x7c00, 0x7e00);
  } else if (dtype == DType::bfloat16) {
    replace_nans<std::uint16_t>(output, 0x7fff, 0x7f80, 0x7fc0);
  } else if (dtype == DType::float32 || dtype == DType::complex64) {
    replace_nans<std::uint32_t>(output, 0x7fffffff, 0x7f800000, 0x7fc00000);
  } else if (dtype == DType::float64 || dtype == DType::complex128) {
    replace_nans<std::uint64_t>(output, 0x7fffffffffffffff, 0x7ff0000000000000, 0x7ff8000000000000);
  }
}

void compute(const SumTask& task) {
  const bool converts = is_half(task.dtype) && task.partial_inputs != task.partial_output;
  if (task.inputs.size() == 1 && task.divisor == 1 && !converts) {
    std::memcpy(task.output.data(), task.inputs[0].data(), task.output.size());
    return;
  }
  const FloatMode mode;
  switch (task.dtype) {
    case DType::boolean:
      return reduce_boolean(task);
    case DType::int8:
      return reduce_signed(task, order_int8, reduce_uint8);
    case DType::int16:
      return reduce_signed(task, order_int16, reduce_uint16);
    case DType::int32:
      return reduce_signed(task, order_int32, reduce_uint32);
    case DType::int64:
      return reduce_signed(task, order_int64, reduce_uint64);
    case DType::uint8:
      return reduce_unsigned(task, reduce_uint8);
    case DType::uint16:
      return reduce_unsigned(task, reduce_uint16);
    case DType::uint32:
      return reduce_unsigned(task, reduce_uint32);
    case DType::uint64:
      return reduce_unsigned(task, reduce_uint64);
    case DType::float16:
    case DType::bfloat16:
      return reduce_half(task);
    case DType::float32:
      return reduce_float32(task);
    case DType::float64:
      return reduce_float64(task);
    // A sum of complex numbers is a sum of twice as many real numbers.
    case DType::complex64:
      return task.op == ReduceOp::prod ? multiply_complex64(task) : reduce_float32(task);
    case DType::complex128:
      return task.op == ReduceOp::prod ? multiply_complex128(task) : reduce_float64(task);
    case DType::float8_e4m3fn:
    case DType::float8_e4m3fnuz:
    case DType::float8_e5m2:
    case DType::float8_e5m2fnuz:
    case DType::float8_e8m0fnu:
      return;  // refused when the operation was started
  }
}

}  // namespace

DType partial_dtype(DType dtype) { return is_half(dtype) ? DType::float32 : dtype; }

bool is_supported(DType dtype, ReduceOp op) {
  const bool half = is_half(dtype);
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
  compute(task);
  if (!task.canonical_nan) return;
  canonicalise(task.partial_output ? partial_dtype(task.dtype) : task.dtype, task.output);
}

float half_to_float(std::uint16_t half) {
  const FloatMode mode;
  return widen_half(half);
}
std::uint16_t float_to_half(float value) {
  const FloatMode mode;
  return static_cast<std::uint16_t>(narrow_half(value));
}
float bfloat16_to_float(std::uint16_t half) { return widen_bfloat16(half); }
std::uint16_t float_to_bfloat16(float value) {
  return static_cast<std::uint16_t>(narrow_bfloat16(value));
}

}  // namespace moolink::collective
