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

// What a received tensor becomes: the sender's framework if it is imported here, or always one.
enum class ArrayKind { same, numpy, torch, jax };
ArrayKind parse_array_kind(std::string_view text);  // throws ValueError

// Why elements were copied that need not have been, had the array been another one.
enum class CopyReason : std::uint8_t {
  none,
  gaps,           // given: strides that leave gaps, or another order than row-major
  byte_order,     // given: big-endian
  lazy_view,      // given: conjugated or negated on reading
  several_parts,  // given: a jax.Array sharded over several devices
  lent,           // received: what is lent, as a framework's that knows no read-only arrays
  alignment,      // received: memory that does not begin at 64 bytes
};
inline constexpr std::size_t kCopyReasons = 7;

// Counts such copies; each reason is logged when it is met first. Needs the GIL.
class CopyCounts {
 public:
  void add(CopyReason reason, std::size_t bytes);
  nb::dict describe() const;

 private:
  std::array<std::uint64_t, kCopyReasons> counts_{};
  std::uint64_t bytes_ = 0;
};

// A framework's tensor by reference. The memory is valid as long as `owner` lives; dropping that
// takes the GIL.
struct ImportedTensor {
  tensor::TensorRef tensor;
  wire::Framework framework = wire::Framework::other;
  // As wire::TensorHead::numpy_type; tensor.dtype means nothing then.
  std::string numpy_type;
  nb::object owner;
  CopyReason copied = CopyReason::none;  // on the way here
  // Set where the memory is CUDA's: what the tensor's producer has queued comes before what is
  // queued on this stream.
  std::shared_ptr<device::Stream> stream = nullptr;

  std::size_t item_size() const;
  std::size_t bytes() const;  // of the elements, without gaps
  // Whether it was copied, or has to be on its way to compact memory.
  CopyReason copy_reason() const;
  wire::TensorHead head() const;
};

// Empty when the value is no tensor. Raises TypeError for tensors that cannot be read here, naming
// the dtype or device and what to do: sub-byte and structured elements, other devices than the CPU
// and CUDA's, sparse layouts, traced values, subclasses whose meaning would be lost.
// Big-endian arrays are converted; conjugated and negated views are resolved.
std::optional<ImportedTensor> import_tensor(nb::handle value);

// The same for values that must be tensors of numbers in host memory (gradients, parameters,
// reductions); takes objects with the buffer protocol too. Raises TypeError otherwise.
ImportedTensor import_numbers(nb::handle value);

// Copies the elements in row-major order; needs no GIL. From a device, it waits for it.
void copy_elements(const ImportedTensor& from, std::byte* to);
// The same for memory that another process will read.
void copy_elements_past_cache(const ImportedTensor& from, const MutableBuffer& to);

// What a received tensor of this kind becomes: "same" is decided.
ArrayKind array_kind(const wire::TensorHead& head, ArrayKind asked);

// An array that owns `memory`: private, writable (JAX: immutable by type, numpy's if `read_only`),
// never copied when memory is 64-byte aligned. Throws ErrorCode::wire when this process cannot
// represent it (a bfloat16 array for numpy without ml_dtypes, a float64 one for JAX without x64).
nb::object export_tensor(MutableBuffer memory, const wire::TensorHead& head, ArrayKind kind,
                         bool read_only = false);

// numpy's view of a tensor of any framework, without a copy; cannot be written where that must not
// be. Of what lies on a device it is a copy. Raises as import_tensor() does, and TypeError for what
// is no tensor.
nb::object as_array(nb::handle value);

// numpy's scalar of one element.
nb::object export_scalar(std::span<const std::byte> value, const wire::TensorHead& head);
// Empty when the value is no numpy scalar; raises TypeError for structured ones.
std::optional<wire::TensorHead> import_scalar(nb::handle value, std::string& bytes);

void bind_tensors(nb::module_& m);

}  // namespace moolink::bind
