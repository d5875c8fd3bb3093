#pragma once

// The element types that moolink moves. The numbers are part of the protocol: append, never
// renumber.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moolink::tensor {

enum class DType : std::uint8_t {
  boolean,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  float16,
  float32,
  float64,
  complex64,
  complex128,
  bfloat16,
  float8_e4m3fn,
  float8_e4m3fnuz,
  float8_e5m2,
  float8_e5m2fnuz,
  float8_e8m0fnu,
};
inline constexpr std::size_t kDTypes = 20;
constexpr DType enum_max(DType) { return DType::float8_e8m0fnu; }

// DLPack's description of an element: code of DLDataTypeCode, width in bits, vector lanes.
struct DLPackType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 1;

  bool operator==(const DLPackType&) const = default;
};

std::size_t item_size(DType dtype);        // bytes of an element
std::string_view dtype_name(DType dtype);  // numpy's and ml_dtypes' name: "float32"
DLPackType to_dlpack(DType dtype);

// Empty: not an element type that moolink moves (sub-byte types, vectors, quantised types).
std::optional<DType> from_dlpack(DLPackType type);
std::optional<DType> dtype_from_name(std::string_view name);
// The common name of a type that moolink may not move: "int4", "float4_e2m1fn", "float32 x4".
std::string dlpack_name(DLPackType type);

bool is_floating(DType dtype);  // includes bfloat16 and the 8-bit kinds
bool is_complex(DType dtype);
// Whether numpy has the type itself; the others come from the package ml_dtypes.
bool is_native_to_numpy(DType dtype);

}  // namespace moolink::tensor
