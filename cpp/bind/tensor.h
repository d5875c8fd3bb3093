#pragma once

// Tensors of every framework, in and out: DLPack (its C exchange API where the type has it, else
// __dlpack__), numpy through the buffer protocol, JAX through numpy.

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/buffer.h"
#include "device/devices.h"
#include "tensor/layout.h"
#include "wire/value.h"

namespace moolink::bind {

namespace nb = nanobind;

// The array type of a received tensor: the sender's framework if imported here, or always one.
enum class ArrayKind { same, numpy, torch, jax };
ArrayKind parse_array_kind(std::string_view text);  // throws ValueError

// Why elements were copied that another array would not need copied.
enum class CopyReason : std::uint8_t {
  none,
  gaps,           // given: strides with gaps, or another order than row-major
  byte_order,     // given: big-endian
  lazy_view,      // given: conjugated or negated on reading
  several_parts,  // given: a jax.Array sharded over several devices
  lent,           // received: lent memory, for a framework without read-only arrays
  alignment,      // received: memory not aligned to 64 bytes
};
inline constexpr std::size_t kCopyReasons = 7;

// Counts such copies; logs each reason at its first occurrence. Needs the GIL.
class CopyCounts {
 public:
  void add(CopyReason reason, std::size_t bytes);
  nb::dict describe() const;

 private:
  std::array<std::uint64_t, kCopyReasons> counts_{};
  std::uint64_t bytes_ = 0;
};

// A framework's tensor by reference. The memory is valid while `owner` lives; dropping it takes the
// GIL.
struct ImportedTensor {
  tensor::TensorRef tensor;
  wire::Framework framework = wire::Framework::other;
  // Like wire::TensorHead::numpy_type; tensor.dtype is meaningless then.
  std::string numpy_type;
  nb::object owner;
  CopyReason copied = CopyReason::none;  // during the import
  // Set if the memory is CUDA's: the producer's queued work precedes work queued on this stream.
  std::shared_ptr<device::Stream> stream = nullptr;

  std::size_t item_size() const;
  std::size_t bytes() const;  // of the elements, without gaps
  // The memory between its first and last byte.
  struct Span {
    std::ptrdiff_t begin = 0;  // from the first element
    std::size_t bytes = 0;
  };
  Span span() const;
  // The elements, which must have no gaps. The buffer keeps the owner alive.
  MutableBuffer memory() const;
  // Why it was copied, or must be copied on its way to compact memory.
  CopyReason copy_reason() const;
  wire::TensorHead head() const;
};

// Empty when the value is no tensor. Raises TypeError for tensors that cannot be read here, with
// the dtype or device and the remedy: sub-byte and structured elements, other devices than the CPU
// and CUDA's, sparse layouts, traced values, subclasses that would lose their meaning. Big-endian
// arrays are converted; conjugated and negated views are resolved. A subclass of torch.Tensor
// without a dispatch of its own is read as the plain tensor of its memory.
std::optional<ImportedTensor> import_tensor(nb::handle value);

// Whether the value is an array or tensor. Raises TypeError, with `name` first, for those that
// cannot be read as plain memory: the same ones as import_tensor(), but any dtype and torch's other
// devices pass. For callers that let the array's own framework copy it.
bool check_array(nb::handle value, const std::string& name);

// The same for values that must be tensors of numbers in host memory (gradients, parameters,
// reductions); also accepts objects with the buffer protocol. Raises TypeError otherwise.
ImportedTensor import_numbers(nb::handle value);

// The same for values that may be anything: empty unless it is a tensor of numbers that can be read
// here.
std::optional<ImportedTensor> try_import(nb::handle value);

// Throws Exception{invalid_argument} for an unknown name.
tensor::DType dtype_named(const std::string& name);

// Copies the elements in row-major order; needs no GIL. Waits for the tensor's device.
void copy_elements(const ImportedTensor& from, std::byte* to);
// The same for memory that another process will read. `whole`: as for streaming_copy().
void copy_elements_past_cache(const ImportedTensor& from, std::byte* to, std::size_t whole);

// The array type of a received tensor with this head: resolves "same".
ArrayKind array_kind(const wire::TensorHead& head, ArrayKind asked);

// An array that owns `memory`: private, writable (JAX: immutable by type, numpy's if `read_only`),
// never copied when memory is 64-byte aligned. Throws ErrorCode::wire when this process cannot
// represent it (a bfloat16 array for numpy without ml_dtypes, a float64 one for JAX without x64).
nb::object export_tensor(MutableBuffer memory, const wire::TensorHead& head, ArrayKind kind,
                         bool read_only = false);

// numpy's array of these bytes.
nb::object export_bytes(MutableBuffer memory);

// numpy's view of a tensor of any framework, without a copy; read-only if the tensor is. For a
// tensor on a device it is a copy. Raises like import_tensor(), and TypeError if the value is no
// tensor.
nb::object as_array(nb::handle value);

// numpy's scalar of one element.
nb::object export_scalar(std::span<const std::byte> value, const wire::TensorHead& head);
// Empty when the value is no numpy scalar; raises TypeError for structured ones.
std::optional<wire::TensorHead> import_scalar(nb::handle value, std::string& bytes);

void bind_tensors(nb::module_& m);

}  // namespace moolink::bind
