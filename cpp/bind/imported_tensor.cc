// Properties of a tensor of any framework, and copies of its elements. Avoidable copies are
// counted, and each kind is logged once.

#include <string>

#include "base/streaming_copy.h"
#include "bind/context.h"
#include "bind/device.h"
#include "bind/errors.h"
#include "bind/reference.h"
#include "bind/tensor.h"

namespace moolink::bind {
namespace {

struct Explanation {
  const char* name;  // in stats()
  const char* text;
};

// In the order of CopyReason.
constexpr std::array<Explanation, kCopyReasons - 1> kExplanations = {{
    {"gaps",
     "an array with gaps, or not in row-major order, is gathered element by element: give a "
     "contiguous one"},
    {"byte_order", "a big-endian array is converted: give one of this machine's byte order"},
    {"lazy_view", "a conjugated or negated view is computed first: call resolve_conj() once"},
    {"several_parts", "a jax.Array sharded over several devices is put together first"},
    {"lent",
     "a lent array becomes a copy, as the arrays of the framework asked for cannot be "
     "read-only: receive it with arrays=\"numpy\""},
    {"alignment", "memory that does not begin at a multiple of 64 bytes is copied"},
}};

}  // namespace

std::size_t ImportedTensor::item_size() const {
  return numpy_type.empty() ? tensor::item_size(tensor.dtype)
                            : wire::numpy_item_size(numpy_type).value_or(0);
}

ImportedTensor::Span ImportedTensor::span() const {
  const auto item = static_cast<std::ptrdiff_t>(item_size());
  std::ptrdiff_t begin = 0;
  std::ptrdiff_t end = item;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] == 0) return {};
    const std::ptrdiff_t reach = (tensor.shape[i] - 1) * tensor.strides[i] * item;
    (reach < 0 ? begin : end) += reach;
  }
  return {begin, static_cast<std::size_t>(end - begin)};
}

std::size_t ImportedTensor::bytes() const {
  const auto size = tensor::byte_size(item_size(), tensor.shape);
  if (!size) type_error("a tensor of shape " + tensor::shape_text(tensor.shape) + " is too large");
  return static_cast<std::size_t>(*size);
}

MutableBuffer ImportedTensor::memory() const {
  return {std::make_shared<Reference>(owner), tensor.data, bytes()};
}

CopyReason ImportedTensor::copy_reason() const {
  if (copied != CopyReason::none) return copied;
  return tensor.is_contiguous() ? CopyReason::none : CopyReason::gaps;
}

wire::TensorHead ImportedTensor::head() const {
  wire::TensorHead head{framework, tensor.dtype, numpy_type, tensor.shape};
  if (stream != nullptr) head.device = static_cast<std::uint32_t>(stream->device());
  return head;
}

tensor::DType dtype_named(const std::string& name) {
  if (const auto dtype = tensor::dtype_from_name(name)) return *dtype;
  throw Exception(ErrorCode::invalid_argument, "no element type is called '" + name + "'");
}

void copy_elements(const ImportedTensor& from, std::byte* to) {
  if (from.stream != nullptr) {
    DeviceCopies copies;
    copies.add(from, to);
    return copies.run();
  }
  const tensor::TensorRef& tensor = from.tensor;
  tensor::gather(tensor.data, from.item_size(), tensor.shape, tensor.strides, to);
}

void copy_elements_past_cache(const ImportedTensor& from, std::byte* to, std::size_t whole) {
  const tensor::TensorRef& tensor = from.tensor;
  if (from.stream != nullptr || !tensor.is_contiguous()) return copy_elements(from, to);
  const std::size_t size = from.bytes();
  streaming_copy({to, size}, {tensor.data, size}, whole);
}

void CopyCounts::add(CopyReason reason, std::size_t bytes) {
  if (reason == CopyReason::none) return;
  std::uint64_t& count = counts_[static_cast<std::size_t>(reason)];
  bytes_ += bytes;
  if (++count != 1) return;
  const Explanation& explanation = kExplanations[static_cast<std::size_t>(reason) - 1];
  log_info(std::string("copied ") + std::to_string(bytes) + " bytes: " + explanation.text +
           " (logged once; rpc.stats()[\"copies\"][\"" + explanation.name + "\"] is the count)");
}

nb::dict CopyCounts::describe() const {
  nb::dict result;
  for (std::size_t i = 0; i < kExplanations.size(); ++i) {
    result[kExplanations[i].name] = counts_[i + 1];
  }
  result["bytes"] = bytes_;
  return result;
}

}  // namespace moolink::bind
