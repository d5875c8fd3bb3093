// Properties of a tensor of any framework, and copies of its elements.

#include <string>

#include "base/streaming_copy.h"
#include "bind/device.h"
#include "bind/tensor.h"

namespace moolink::bind {

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
  if (!size) {
    const std::string message =
        "a tensor of shape " + tensor::shape_text(tensor.shape) + " is too large";
    throw nb::type_error(message.c_str());
  }
  return static_cast<std::size_t>(*size);
}

CopyReason ImportedTensor::copy_reason() const {
  if (copied != CopyReason::none) return copied;
  return tensor::is_contiguous(tensor.shape, tensor.strides) ? CopyReason::none : CopyReason::gaps;
}

wire::TensorHead ImportedTensor::head() const {
  wire::TensorHead head{framework, tensor.dtype, numpy_type, tensor.shape};
  if (stream != nullptr) head.device = static_cast<std::uint32_t>(stream->device());
  return head;
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

void copy_elements_past_cache(const ImportedTensor& from, const MutableBuffer& to) {
  const tensor::TensorRef& tensor = from.tensor;
  if (from.stream != nullptr || !tensor::is_contiguous(tensor.shape, tensor.strides)) {
    return copy_elements(from, to.data());
  }
  streaming_copy(to.span(), {tensor.data, to.size()}, to.size());
}

}  // namespace moolink::bind
