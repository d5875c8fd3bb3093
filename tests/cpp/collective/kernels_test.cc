#include "collective/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/random.h"
#include "check.h"

namespace kernels_test {

using moolink::Buffer;
using moolink::HeapAllocator;
using moolink::MutableBuffer;
using moolink::Random;
using moolink::collective::is_supported;
using moolink::collective::ReduceOp;
using moolink::collective::SumTask;
using moolink::tensor::DType;
using namespace moolink::collective;

// At an odd address, as in a message, so that UBSan reports code that assumes alignment.
template <class T>
Buffer buffer(const std::vector<T>& values) {
  const std::size_t size = values.size() * sizeof(T);
  const MutableBuffer memory = HeapAllocator().allocate(size + 1).slice(1, size);
  if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
  return memory;
}

// The same with each input's memory as the output in turn.
void check_in_place(const SumTask& task) {
  for (std::size_t place = 0; place < task.inputs.size(); ++place) {
    SumTask in_place = task;
    in_place.output = HeapAllocator().allocate(task.output.size());
    std::memcpy(in_place.output.data(), task.inputs[place].data(), task.output.size());
    in_place.inputs[place] = in_place.output;
    run(in_place);
    CHECK(std::memcmp(in_place.output.data(), task.output.data(), task.output.size()) == 0);
  }
}

template <class T>
std::vector<T> reduced(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs,
                       double divisor = 1) {
  SumTask task{dtype, op, divisor, {}, HeapAllocator().allocate(inputs[0].size() * sizeof(T))};
  for (const auto& input : inputs) task.inputs.push_back(buffer(input));
  run(task);
  check_in_place(task);
  std::vector<T> result(inputs[0].size());
  std::memcpy(result.data(), task.output.data(), task.output.size());
  return result;
}

// The nearest half by search over all of them, ties to the even one: slow and evidently right.
std::uint16_t nearest_half(double value) {
  std::uint16_t best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (std::uint32_t half = 0; half <= 0x7c00; ++half) {
    // Infinity stands for 65536 here, the next number if the exponent had no end.
    const double candidate = half == 0x7c00 ? 65536.0 : half_to_float(std::uint16_t(half));
    const double here = std::fabs(candidate - value);
    if (here < distance || (here == distance && half % 2 == 0)) {
      best = static_cast<std::uint16_t>(half);
      distance = here;
    }
  }
  return best;
}

TEST("float16: every half survives the way to float32 and back") {
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const float wide = half_to_float(static_cast<std::uint16_t>(half));
    const std::uint16_t back = float_to_half(wide);
    if (std::isnan(wide)) {
      CHECK((back & 0x7c00) == 0x7c00 && (back & 0x3ff) != 0);
    } else {
      CHECK_EQ(back, half);
    }
  }
  CHECK_EQ(half_to_float(0x3c00), 1.0f);
  CHECK_EQ(half_to_float(0x0001), std::ldexp(1.0f, -24));
  CHECK_EQ(half_to_float(0xfbff), -65504.0f);
}

TEST("float16: rounding is to the nearest, ties to even") {
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const int exponent = static_cast<int>(random.below(44)) - 27;
    const float value =
        std::ldexp(1.0f + static_cast<float>(random.below(1u << 23)) / (1u << 23), exponent);
    CHECK_EQ(float_to_half(value), nearest_half(value));
  }
  for (const float tie :
       {1.0f + 0x1p-11f, 1.0f + 0x3p-11f, 0x1p-25f, 0x3p-25f, 65519.996f, 65520.0f}) {
    CHECK_EQ(float_to_half(tie), nearest_half(tie));
  }
  CHECK_EQ(float_to_half(std::numeric_limits<float>::infinity()), 0x7c00);
  CHECK_EQ(float_to_half(1e30f), 0x7c00);
  CHECK_EQ(float_to_half(-0.0f), 0x8000);
}

TEST("bfloat16: rounding to even, NaN stays NaN") {
  CHECK_EQ(float_to_bfloat16(1.0f), 0x3f80);
  CHECK_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  CHECK_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  CHECK_EQ(float_to_bfloat16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  CHECK(std::isnan(bfloat16_to_float(float_to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
}

TEST("halves accumulate in float32 and are rounded once") {
  // 2048 + 1 + 1 is 2048 when each step is rounded to float16, and 2050 when only the last one is.
  const std::vector<std::uint16_t> big(5000, float_to_half(2048.0f));
  const std::vector<std::uint16_t> one(5000, float_to_half(1.0f));
  const auto sum = reduced<std::uint16_t>(DType::float16, ReduceOp::sum, {big, one, one});
  for (const std::uint16_t half : sum) CHECK_EQ(half_to_float(half), 2050.0f);
  const std::vector<std::uint16_t> b256(3, float_to_bfloat16(256.0f));
  const std::vector<std::uint16_t> b1(3, float_to_bfloat16(1.0f));
  const auto bsum = reduced<std::uint16_t>(DType::bfloat16, ReduceOp::sum, {b256, b1, b1});
  CHECK_EQ(bfloat16_to_float(bsum[0]), 258.0f);
}

TEST("float32: the sum is in the inputs' order, bit for bit") {
  Random random(2);
  std::vector<std::vector<float>> inputs(5, std::vector<float>(3001));
  for (auto& input : inputs) {
    for (float& value : input) {
      value = std::ldexp(static_cast<float>(random.below(1u << 24)) - (1 << 23),
                         static_cast<int>(random.below(40)) - 40);
    }
  }
  const auto sum = reduced(DType::float32, ReduceOp::sum, inputs, 7.0);
  for (std::size_t i = 0; i < sum.size(); ++i) {
    volatile float expected = inputs[0][i];  // volatile: no contraction, no reassociation
    for (std::size_t n = 1; n < inputs.size(); ++n) expected = expected + inputs[n][i];
    expected = expected / 7.0f;
    CHECK_EQ(std::bit_cast<std::uint32_t>(sum[i]), std::bit_cast<std::uint32_t>(float{expected}));
  }
}

#if defined(__x86_64__)
TEST("denormals are kept although the thread flushes them, and its mode is restored") {
  const unsigned flushing = _mm_getcsr() | 0x8040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(flushing);
  const std::vector<float> tiny(100, std::numeric_limits<float>::denorm_min());
  const auto sum = reduced<float>(DType::float32, ReduceOp::sum, {tiny, tiny});
  CHECK_EQ(_mm_getcsr() & 0x8040, 0x8040u);
  _mm_setcsr(before);
  CHECK_EQ(std::bit_cast<std::uint32_t>(sum[99]), 2u);
}
#endif

TEST("min and max give NaN when one is there, whatever the order") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a = {1, nan, 3};
  const std::vector<float> b = {2, 5, nan};
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    const auto result = reduced<float>(DType::float32, op, {a, b});
    CHECK_EQ(result[0], op == ReduceOp::min ? 1.0f : 2.0f);
    CHECK(std::isnan(result[1]) && std::isnan(result[2]));
  }
}

TEST("integers wrap around, booleans are any and all, bits are bits") {
  const auto sum = reduced<std::int8_t>(DType::int8, ReduceOp::sum, {{100, -100}, {100, -100}});
  CHECK_EQ(int{sum[0]}, -56);
  CHECK_EQ(int{sum[1]}, 56);
  const auto product = reduced<std::int64_t>(DType::int64, ReduceOp::prod,
                                             {{std::numeric_limits<std::int64_t>::max()}, {2}});
  CHECK_EQ(product[0], std::int64_t{-2});
  const std::vector<std::uint8_t> a = {0, 0, 1, 1};
  const std::vector<std::uint8_t> b = {0, 1, 0, 1};
  using Bytes = std::vector<std::uint8_t>;
  CHECK((reduced<std::uint8_t>(DType::boolean, ReduceOp::sum, {a, b}) == Bytes{0, 1, 1, 1}));
  CHECK((reduced<std::uint8_t>(DType::boolean, ReduceOp::prod, {a, b}) == Bytes{0, 0, 0, 1}));
  CHECK((reduced<std::uint8_t>(DType::boolean, ReduceOp::bit_xor, {a, b}) == Bytes{0, 1, 1, 0}));
  CHECK((reduced<std::uint16_t>(DType::uint16, ReduceOp::bit_and, {{12}, {10}}) ==
         std::vector<std::uint16_t>{8}));
}

TEST("complex sums, products and means") {
  using Complex = std::complex<double>;
  const std::vector<std::vector<Complex>> inputs = {{{1, 2}}, {{3, -1}}};
  CHECK((reduced(DType::complex128, ReduceOp::sum, inputs)[0] == Complex{4, 1}));
  CHECK((reduced(DType::complex128, ReduceOp::prod, inputs)[0] == Complex{5, 5}));
  CHECK((reduced(DType::complex128, ReduceOp::mean, inputs, 2)[0] == Complex{2, 0.5}));
}

TEST("what has no meaning is refused") {
  CHECK(!is_supported(DType::complex64, ReduceOp::max));
  CHECK(!is_supported(DType::int32, ReduceOp::mean));
  CHECK(!is_supported(DType::float32, ReduceOp::bit_or));
  CHECK(!is_supported(DType::float8_e4m3fn, ReduceOp::sum));
  CHECK(is_supported(DType::boolean, ReduceOp::sum));
}

// The kernels' arithmetic once more, element by element, in the plainest way.
template <class T>
T plain(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean:
      return static_cast<T>(a + b);
    case ReduceOp::prod:
      return static_cast<T>(a * b);
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      return std::max(a, b);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::bit_and) return static_cast<T>(a & b);
    if (op == ReduceOp::bit_or) return static_cast<T>(a | b);
    return static_cast<T>(a ^ b);
  }
  return a;
}

constexpr ReduceOp kAllOps[] = {ReduceOp::sum,    ReduceOp::mean,   ReduceOp::min,
                                ReduceOp::max,    ReduceOp::prod,   ReduceOp::bit_and,
                                ReduceOp::bit_or, ReduceOp::bit_xor};

template <class T>
void check_all_ops(DType dtype) {
  Random random(9);
  for (const std::size_t members : {1u, 2u, 3u, 5u}) {
    std::vector<std::vector<T>> inputs(members, std::vector<T>(1500));
    for (auto& input : inputs) {
      for (T& value : input) value = static_cast<T>(random.below(11));
    }
    for (const ReduceOp op : kAllOps) {
      if (!is_supported(dtype, op)) continue;
      const double divisor = op == ReduceOp::mean ? static_cast<double>(members) : 1.0;
      const auto result = reduced<T>(dtype, op, inputs, divisor);
      for (std::size_t i = 0; i < result.size(); ++i) {
        T expected = inputs[0][i];
        for (std::size_t n = 1; n < members; ++n) expected = plain(op, expected, inputs[n][i]);
        if (op == ReduceOp::mean) expected = static_cast<T>(expected / static_cast<T>(divisor));
        CHECK_EQ(result[i], expected);
      }
    }
  }
}

TEST("every operation on every type of numbers, any number of inputs") {
  check_all_ops<std::int8_t>(DType::int8);
  check_all_ops<std::int16_t>(DType::int16);
  check_all_ops<std::int32_t>(DType::int32);
  check_all_ops<std::int64_t>(DType::int64);
  check_all_ops<std::uint8_t>(DType::uint8);
  check_all_ops<std::uint16_t>(DType::uint16);
  check_all_ops<std::uint32_t>(DType::uint32);
  check_all_ops<std::uint64_t>(DType::uint64);
  check_all_ops<float>(DType::float32);
  check_all_ops<double>(DType::float64);
}

TEST("halves: any number of inputs and elements, at any address, as one by one") {
  Random random(11);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const auto widen = dtype == DType::float16 ? half_to_float : bfloat16_to_float;
    const auto narrow = dtype == DType::float16 ? float_to_half : float_to_bfloat16;
    for (const std::size_t members : {1u, 2u, 3u, 5u}) {
      for (const std::size_t count : {1u, 2u, 7u, 2047u, 5001u}) {
        std::vector<std::vector<std::uint16_t>> inputs(members,
                                                       std::vector<std::uint16_t>(count + 1));
        for (auto& input : inputs) {
          for (auto& half : input) half = static_cast<std::uint16_t>(random.next());
        }
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::prod}) {
          const double divisor = op == ReduceOp::mean ? 3 : 1;
          HeapAllocator heap;
          SumTask task{dtype, op, divisor, {}, heap.allocate(2 * count + 2).slice(2, 2 * count)};
          for (const auto& input : inputs) {
            task.inputs.push_back(buffer(input).slice(2, 2 * count));
          }
          run(task);
          task.canonical_nan = true;  // which of two a sum returns is up to the instructions
          run(task);
          check_in_place(task);
          for (std::size_t i = 0; i < count; ++i) {
            float expected = widen(inputs[0][i + 1]);
            for (std::size_t n = 1; n < members; ++n) {
              const float next = widen(inputs[n][i + 1]);
              if (op == ReduceOp::min) {
                expected = next < expected || std::isnan(next) ? next : expected;
              } else {
                expected = plain(op, expected, next);
              }
            }
            std::uint16_t half = 0;
            std::memcpy(&half, task.output.data() + 2 * i, 2);
            const std::uint16_t wanted = narrow(expected / static_cast<float>(divisor));
            CHECK(half == wanted || (std::isnan(widen(half)) && std::isnan(widen(wanted))));
          }
        }
      }
    }
  }
}

TEST("partial sums of halves are float32, and rounding them once is the sum in one step") {
  Random random(10);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    CHECK(partial_dtype(dtype) == DType::float32);
    std::vector<Buffer> inputs;
    for (int n = 0; n < 4; ++n) {
      std::vector<std::uint16_t> halves(3000);
      for (auto& half : halves) {
        const float value = static_cast<float>(random.below(4096)) - 2048.0f;
        half = dtype == DType::float16 ? float_to_half(value) : float_to_bfloat16(value / 3);
      }
      inputs.push_back(buffer(halves));
    }
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::mean}) {
      const double divisor = op == ReduceOp::mean ? 4 : 1;
      HeapAllocator heap;
      SumTask whole{dtype, op, divisor, inputs, heap.allocate(6000)};
      run(whole);
      SumTask left{dtype, op, 1, {inputs[0], inputs[1]}, heap.allocate(12000)};
      left.partial_output = true;
      run(left);
      SumTask right{dtype, op, 1, {left.output}, heap.allocate(12000)};
      right.partial_inputs = right.partial_output = true;
      run(right);
      for (int n = 2; n < 4; ++n) {
        SumTask widen{dtype, op, 1, {inputs[n]}, heap.allocate(12000)};
        widen.partial_output = true;
        run(widen);
        SumTask add{dtype, op, 1, {right.output, widen.output}, heap.allocate(12000)};
        add.partial_inputs = add.partial_output = true;
        run(add);
        right.output = add.output;
      }
      SumTask last{dtype, op, divisor, {right.output}, heap.allocate(6000)};
      last.partial_inputs = true;
      run(last);
      CHECK(std::memcmp(last.output.data(), whole.output.data(), 6000) == 0);
    }
  }
  CHECK(partial_dtype(DType::float64) == DType::float64);
}

}  // namespace kernels_test
