#include "tensor/dtype.h"

#include <array>

namespace moolink::tensor {
namespace {

// Codes of DLDataTypeCode in dlpack.h 1.3.
enum Code : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E3m4 = 7,
  kFloat8E4m3fn = 10,
  kFloat8E4m3fnuz = 11,
  kFloat8E5m2 = 12,
  kFloat8E5m2fnuz = 13,
  kFloat8E8m0fnu = 14,
};

struct Row {
  std::string_view name;
  DLPackType dlpack;
};

// In the order of DType.
constexpr std::array<Row, kDTypes> kRows = {{
    {"bool", {kBool, 8, 1}},
    {"int8", {kInt, 8, 1}},
    {"int16", {kInt, 16, 1}},
    {"int32", {kInt, 32, 1}},
    {"int64", {kInt, 64, 1}},
    {"uint8", {kUInt, 8, 1}},
    {"uint16", {kUInt, 16, 1}},
    {"uint32", {kUInt, 32, 1}},
    {"uint64", {kUInt, 64, 1}},
    {"float16", {kFloat, 16, 1}},
    {"float32", {kFloat, 32, 1}},
    {"float64", {kFloat, 64, 1}},
    {"complex64", {kComplex, 64, 1}},
    {"complex128", {kComplex, 128, 1}},
    {"bfloat16", {kBfloat, 16, 1}},
    {"float8_e4m3fn", {kFloat8E4m3fn, 8, 1}},
    {"float8_e4m3fnuz", {kFloat8E4m3fnuz, 8, 1}},
    {"float8_e5m2", {kFloat8E5m2, 8, 1}},
    {"float8_e5m2fnuz", {kFloat8E5m2fnuz, 8, 1}},
    {"float8_e8m0fnu", {kFloat8E8m0fnu, 8, 1}},
}};

const Row& row(DType dtype) { return kRows[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::size_t item_size(DType dtype) { return row(dtype).dlpack.bits / 8; }

std::string_view dtype_name(DType dtype) { return row(dtype).name; }

DLPackType to_dlpack(DType dtype) { return row(dtype).dlpack; }

std::optional<DType> from_dlpack(DLPackType type) {
  for (std::size_t i = 0; i < kDTypes; ++i) {
    if (kRows[i].dlpack == type) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kDTypes; ++i) {
    if (kRows[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

std::string dlpack_name(DLPackType type) {
  // By code; from the eighth on a name includes the width.
  constexpr std::array<std::string_view, 18> kNames = {"int",
                                                       "uint",
                                                       "float",
                                                       "opaque handle",
                                                       "bfloat",
                                                       "complex",
                                                       "bool",
                                                       "float8_e3m4",
                                                       "float8_e4m3",
                                                       "float8_e4m3b11fnuz",
                                                       "float8_e4m3fn",
                                                       "float8_e4m3fnuz",
                                                       "float8_e5m2",
                                                       "float8_e5m2fnuz",
                                                       "float8_e8m0fnu",
                                                       "float6_e2m3fn",
                                                       "float6_e3m2fn",
                                                       "float4_e2m1fn"};
  std::string name = type.code < kNames.size() ? std::string(kNames[type.code])
                                               : "DLPack code " + std::to_string(type.code) + ", ";
  const bool says_width = type.code >= kFloat8E3m4 && type.code < kNames.size();
  if (!says_width && !(type.code == kBool && type.bits == 8)) name += std::to_string(type.bits);
  if (type.code >= kNames.size()) name += " bits";
  if (type.lanes != 1) name += " x" + std::to_string(type.lanes);
  return name;
}

bool is_floating(DType dtype) {
  const std::uint8_t code = row(dtype).dlpack.code;
  return code == kFloat || code == kBfloat || code >= kFloat8E4m3fn;
}

bool is_complex(DType dtype) { return row(dtype).dlpack.code == kComplex; }

bool is_native_to_numpy(DType dtype) { return dtype < DType::bfloat16; }

}  // namespace moolink::tensor
