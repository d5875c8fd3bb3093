#include "collective/compression.h"

#include <cstring>

#include "collective/float_mode.h"
#include "collective/kernel_target.h"

namespace moolink::collective {
namespace {

constexpr std::size_t kBlock = 256;  // elements that share a scale
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr std::uint32_t kInfinity = 0x7f800000u;

MOOLINK_INLINE bool is_finite(float value) { return (to_bits(value) & kMagnitude) < kInfinity; }

MOOLINK_INLINE void encode_bf16_block(const float* __restrict input, float* __restrict residual,
                                      std::uint16_t* __restrict output, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) {
    const float value = input[i] + residual[i];
    const std::uint32_t code = narrow_bfloat16(value);
    const float lost = value - widen_bfloat16(code);
    output[i] = static_cast<std::uint16_t>(code);
    residual[i] = is_finite(lost) ? lost : 0.0f;
  }
}

MOOLINK_CLONES void encode_bf16(const float* input, float* residual, std::uint16_t* output,
                                std::size_t count) {
  float none[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = count - begin < kBlock ? count - begin : kBlock;
    if (residual == nullptr) std::memset(none, 0, sizeof none);
    encode_bf16_block(input + begin, residual == nullptr ? none : residual + begin, output + begin,
                      size);
  }
}

MOOLINK_CLONES void decode_bf16(const Packed<std::uint16_t>* __restrict input,
                                float* __restrict output, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) output[i] = widen_bfloat16(input[i].get());
}

// Returns the scale.
MOOLINK_INLINE float encode_int8_block(const float* __restrict input, float* __restrict residual,
                                       std::int8_t* __restrict output, std::size_t size) {
  constexpr float kRound = 0x1.8p23f;  // added and subtracted: rounds to the nearest integer
  constexpr float kLeast = 0x1p-100f;  // below, the reciprocal of the scale could overflow
  std::uint32_t greatest = 0;          // magnitude, as bits: they are ordered like the numbers
  for (std::size_t i = 0; i < size; ++i) {
    residual[i] = input[i] + residual[i];
    const std::uint32_t magnitude = to_bits(residual[i]) & kMagnitude;
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  if (greatest >= kInfinity) {
    for (std::size_t i = 0; i < size; ++i) {
      residual[i] = 0;
      output[i] = 0;
    }
    return from_bits(kInfinity | 0x400000u);
  }
  const bool usable = from_bits(greatest) >= kLeast;
  // Rounded down, so that 127 times the scale does not exceed the greatest finite number.
  const float scale = usable ? from_bits(to_bits(from_bits(greatest) / 127.0f) - 1) : 0.0f;
  const float inverse = usable ? 127.0f / from_bits(greatest) : 0.0f;
  for (std::size_t i = 0; i < size; ++i) {
    const float whole = (residual[i] * inverse + kRound) - kRound;
    output[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(whole));
    residual[i] = residual[i] - whole * scale;
  }
  return scale;
}

MOOLINK_CLONES void encode_int8(const float* input, float* residual, float* scales,
                                std::int8_t* output, std::size_t count) {
  float none[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = count - begin < kBlock ? count - begin : kBlock;
    if (residual == nullptr) std::memset(none, 0, sizeof none);
    *scales++ = encode_int8_block(input + begin, residual == nullptr ? none : residual + begin,
                                  output + begin, size);
  }
}

MOOLINK_CLONES void decode_int8(const Packed<float>* scales, const std::int8_t* input,
                                float* output, std::size_t count) {
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = count - begin < kBlock ? count - begin : kBlock;
    const float scale = (scales++)->get();
    const std::int8_t* __restrict from = input + begin;
    float* __restrict to = output + begin;
    for (std::size_t i = 0; i < size; ++i) to[i] = scale * static_cast<float>(from[i]);
  }
}

std::size_t scales_size(std::uint64_t count) {
  return (count + kBlock - 1) / kBlock * sizeof(float);
}

}  // namespace

std::size_t encoded_size(Compression compression, std::uint64_t count) {
  switch (compression) {
    case Compression::none:
      break;
    case Compression::bf16:
      return count * sizeof(std::uint16_t);
    case Compression::int8:
      return scales_size(count) + count;
  }
  return count * sizeof(float);
}

void run(const EncodeTask& task) {
  const FloatMode mode;
  const auto* input = reinterpret_cast<const float*>(task.input.data());
  auto* residual = task.residual.empty() ? nullptr : reinterpret_cast<float*>(task.residual.data());
  const std::size_t count = task.input.size() / sizeof(float);
  switch (task.compression) {
    case Compression::none:
      if (count != 0) std::memcpy(task.output.data(), input, task.input.size());
      return;
    case Compression::bf16:
      return encode_bf16(input, residual, reinterpret_cast<std::uint16_t*>(task.output.data()),
                         count);
    case Compression::int8:
      return encode_int8(input, residual, reinterpret_cast<float*>(task.output.data()),
                         reinterpret_cast<std::int8_t*>(task.output.data() + scales_size(count)),
                         count);
  }
}

void run(const DecodeTask& task) {
  const FloatMode mode;
  auto* output = reinterpret_cast<float*>(task.output.data());
  const std::size_t count = task.output.size() / sizeof(float);
  switch (task.compression) {
    case Compression::none:
      if (count != 0) std::memcpy(output, task.input.data(), task.output.size());
      return;
    case Compression::bf16:
      return decode_bf16(reinterpret_cast<const Packed<std::uint16_t>*>(task.input.data()), output,
                         count);
    case Compression::int8:
      return decode_int8(
          reinterpret_cast<const Packed<float>*>(task.input.data()),
          reinterpret_cast<const std::int8_t*>(task.input.data() + scales_size(count)), output,
          count);
  }
}

}  // namespace moolink::collective
