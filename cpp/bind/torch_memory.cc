#include "bind/torch_memory.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "bind/errors.h"

namespace moolink::bind {
namespace {

nb::handle torch_strided() {
  static PyObject* strided = nullptr;
  if (strided == nullptr) {
    strided = nb::object(nb::module_::import_("torch").attr("strided")).release().ptr();
  }
  return strided;
}

[[noreturn]] void refuse_without_memory(nb::handle tensor) {
  type_error("a " + type_text(tensor) + " of shape " + text_of(tensor.attr("shape")) +
             " has no memory: its storage was freed or made smaller (resize_), or it only stands "
             "for its values; send a clone that holds them");
}

[[noreturn]] void refuse_without_storage(nb::handle tensor, const nb::python_error& error) {
  type_error("a " + type_text(tensor) + " without plain memory cannot be read (" +
             first_line(error) +
             "): send it outside of torch.func transforms, nested tensors one by one");
}

// Offsets in bytes from the first element: the begin of the lowest, and the end of the highest.
std::pair<std::int64_t, std::int64_t> reach(const DLTensor& tensor) {
  const std::int64_t item = tensor.dtype.bits / 8 * tensor.dtype.lanes;
  std::int64_t begin = 0;
  std::int64_t end = item;
  std::int64_t compact = item;
  for (int i = tensor.ndim; i-- > 0;) {
    const std::int64_t stride = tensor.strides == nullptr ? compact : tensor.strides[i] * item;
    ((tensor.shape[i] - 1) * stride < 0 ? begin : end) += (tensor.shape[i] - 1) * stride;
    compact *= tensor.shape[i];
  }
  return {begin, end};
}

bool is_empty(const DLTensor& tensor) {
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return true;
  }
  return false;
}

}  // namespace

nb::object plain_torch(nb::object tensor, Importer importer) {
  if (importer != Importer::torch_subclass) return tensor;
  // Its own __torch_function__ would run, and return its own class.
  const nb::object own_functions =
      nb::module_::import_("torch._C").attr("DisableTorchFunctionSubclass")();
  own_functions.attr("__enter__")();
  const auto leave = [&] { own_functions.attr("__exit__")(nb::none(), nb::none(), nb::none()); };
  try {
    tensor = tensor.attr("detach")();
  } catch (...) {
    leave();
    throw;
  }
  leave();
  return tensor;
}

nb::object torch_storage(nb::handle tensor) {
  const nb::object layout = tensor.attr("layout");
  if (!layout.is(torch_strided())) {
    type_error("a " + type_text(tensor) + " of layout " + text_of(layout) +
               " cannot be read; call to_dense(), or send indices and values");
  }
  nb::object storage;
  try {
    storage = tensor.attr("untyped_storage")();
  } catch (nb::python_error& e) {
    refuse_without_storage(tensor, e);
  }
  if (nb::cast<std::size_t>(storage.attr("nbytes")()) == 0 &&
      nb::cast<std::size_t>(tensor.attr("numel")()) != 0) {
    refuse_without_memory(tensor);
  }
  return storage;
}

DLTensor torch_description(nb::handle tensor, const DLPackExchangeAPI* api, nb::handle storage) {
  DLTensor described;
  if (api->dltensor_from_py_object_no_sync(tensor.ptr(), &described) != 0) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) nb::raise_python_error();
    refuse_without_storage(tensor, nb::python_error());
  }
  if (is_empty(described)) return described;
  if (described.data == nullptr) refuse_without_memory(tensor);
  const auto memory = nb::cast<std::uintptr_t>(storage.attr("data_ptr")());
  const auto size = nb::cast<std::int64_t>(storage.attr("nbytes")());
  const auto first = reinterpret_cast<std::uintptr_t>(described.data) + described.byte_offset;
  const auto [begin, end] = reach(described);
  const auto offset = static_cast<std::int64_t>(first - memory);
  if (offset + begin < 0 || offset + end > size) {
    refuse_without_memory(tensor);
  }
  return described;
}

}  // namespace moolink::bind
