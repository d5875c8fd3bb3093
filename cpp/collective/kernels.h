#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/enum_names.h"
#include "tensor/dtype.h"

namespace moolink::collective {

// How elements of several members combine. The numbers are part of the protocol.
enum class ReduceOp : std::uint8_t { sum, mean, min, max, prod, bit_and, bit_or, bit_xor };
constexpr ReduceOp enum_max(ReduceOp) { return ReduceOp::bit_xor; }
inline constexpr auto kOpNames =
    enum_names<ReduceOp::bit_xor>("sum", "mean", "min", "max", "prod", "and", "or", "xor");
inline std::string op_name(ReduceOp op) { return kOpNames[op]; }

// Whether elements of this type support the operation. Booleans: sum, max and bit_or are "any",
// prod, min and bit_and are "all". Complex numbers have no order; mean needs a type with fractions;
// bit operations need integers; 8-bit floating point is moved but not reduced.
bool is_supported(tensor::DType dtype, ReduceOp op);

// The type of incomplete sums, also between hosts: float16 and bfloat16 accumulate in float32 and
// are rounded once, at the end; other types stay as they are.
tensor::DType partial_dtype(tensor::DType dtype);

// output[i] = (inputs[0][i] op inputs[1][i] op ...) / divisor, in exactly that order, so that the
// bits depend only on the inputs. float16 and bfloat16 accumulate in float32 and are rounded once.
// Integers wrap around and take no divisor; min and max propagate NaN.
struct SumTask {
  tensor::DType dtype = tensor::DType::float32;
  ReduceOp op = ReduceOp::sum;
  double divisor = 1;
  std::vector<Buffer> inputs;  // each of as many elements as output, and at least one
  MutableBuffer output;        // one input's memory, or no input's
  // Whether these are partial sums, of partial_dtype(dtype), instead of stored elements.
  bool partial_inputs = false;
  bool partial_output = false;
  // Whether every NaN in the output becomes the same one. Which of two NaN a sum returns depends on
  // the instructions, which matters where several members compute the same elements.
  bool canonical_nan = false;
};

// Runs on any thread. Denormals and rounding follow IEEE 754 whatever mode the caller's thread has
// set (frameworks flush denormals); that mode is restored.
void run(const SumTask& task);

// float16 <-> float32, rounding to nearest even; exact in the other direction.
float half_to_float(std::uint16_t half);
std::uint16_t float_to_half(float value);
float bfloat16_to_float(std::uint16_t half);
std::uint16_t float_to_bfloat16(float value);

}  // namespace moolink::collective
