#pragma once

#include <cstddef>
#include <cstdint>

#include "base/buffer.h"
#include "base/enum_names.h"

namespace moolink::collective {

// The encoding of float32 elements between hosts. The numbers are part of the protocol.
//   bf16  rounded to bfloat16, to nearest even: half the bytes, a relative error of 2^-9
//   int8  blocks of 256 elements with a scale each, the greatest magnitude / 127: 0.254 of the
//         bytes, an error of 1/254 of the block's greatest magnitude
// The sender alone encodes; decoded values depend only on the encoded bytes, and are the same on
// every machine.
enum class Compression : std::uint8_t { none, bf16, int8 };
constexpr Compression enum_max(Compression) { return Compression::int8; }
inline constexpr auto kCompressionNames = enum_names<Compression::int8>("none", "bf16", "int8");

// Bytes of `count` encoded elements.
std::size_t encoded_size(Compression compression, std::uint64_t count);

// Encodes input + residual and leaves in residual the part that the encoded bytes lack, to be added
// the next time: the error of a sum over many operations stays that of one. Without residual the
// error is lost.
//
// Non-finite values are never hidden and never carried over: bf16 keeps infinities and NaN in place
// (magnitudes beyond the greatest bfloat16 become infinite); in int8 the whole block becomes NaN.
// Its residual is zero then.
struct EncodeTask {
  Compression compression = Compression::none;
  Buffer input;            // float32
  MutableBuffer residual;  // as many float32, or empty
  MutableBuffer output;    // encoded_size()
};

struct DecodeTask {
  Compression compression = Compression::none;
  Buffer input;          // encoded_size()
  MutableBuffer output;  // float32
};

// On any thread, in IEEE 754 arithmetic like kernels.h.
void run(const EncodeTask& task);
void run(const DecodeTask& task);

}  // namespace moolink::collective
