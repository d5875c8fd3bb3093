#pragma once

// The used part of XLA's C interface for typed custom calls (XLA_FFI, API 0.x, stable since jaxlib
// 0.4.31), declared by hand so that the build needs no jaxlib. Names and order are those of
// xla/ffi/api/c_api.h without the prefix; tests/interop/test_ffi_interface.py compares every offset
// with the header of the installed jaxlib.

#include <cstddef>
#include <cstdint>

namespace moolink::bind::xla {

inline constexpr int kMajor = 0;

enum class ExtensionType : int { metadata = 1 };

struct Extension {
  std::size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  std::size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

struct Error;

// The values of absl::StatusCode.
enum class Code : int {
  cancelled = 1,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  failed_precondition = 9,
  aborted = 10,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
};

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extension_start;
  const char* message;
  Code code;
};

struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extension_start;
  void* context;
  void* stream;  // out: a CUstream on CUDA
};

struct DeviceOrdinalGetArgs {
  std::size_t struct_size;
  Extension* extension_start;
  void* context;
  std::int32_t device_ordinal;  // out
};

struct Api {
  std::size_t struct_size;
  Extension* extension_start;
  Version api_version;
  const void* internal_api;
  Error* (*error_create)(ErrorCreateArgs*);
  const void* unused_before_stream[3];
  Error* (*stream_get)(StreamGetArgs*);
  const void* unused_before_device[12];
  Error* (*device_ordinal_get)(DeviceOrdinalGetArgs*);
};

struct Buffer {
  std::size_t struct_size;
  Extension* extension_start;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

enum class AttributeType : int { array = 1, dictionary = 2, scalar = 3, string = 4 };

struct ByteSpan {
  const char* data;
  std::size_t size;
};

enum class Stage : int { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

struct Arguments {
  std::size_t struct_size;
  Extension* extension_start;
  std::int64_t size;
  int* types;  // 1: a buffer
  void** values;
};

using Results = Arguments;

struct Attributes {
  std::size_t struct_size;
  Extension* extension_start;
  std::int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extension_start;
  const Api* api;
  void* context;
  Stage stage;
  Arguments arguments;
  Results results;
  Attributes attributes;
};

struct Metadata {
  std::size_t struct_size;
  Version api_version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

}  // namespace moolink::bind::xla
