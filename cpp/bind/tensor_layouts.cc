#include "bind/tensor_layouts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "bind/bindings.h"
#include "bind/tensor.h"

namespace moolink::bind {

TensorLayouts::TensorLayouts(const std::vector<Layout>& layouts) {
  for (const auto& [shape, name] : layouts) {
    const auto dtype = tensor::dtype_from_name(name);
    if (!dtype) throw Exception(ErrorCode::invalid_argument, "no element type " + name);
    wanted_.push_back({shape, *dtype});
  }
}

std::optional<std::vector<std::uintptr_t>> TensorLayouts::addresses(const nb::list& tensors) const {
  if (tensors.size() != wanted_.size()) return std::nullopt;
  std::vector<std::uintptr_t> addresses;
  addresses.reserve(wanted_.size());
  try {
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      const nb::handle value = tensors[i];
      if (value.is_none()) {
        addresses.push_back(0);
        continue;
      }
      const auto imported = import_tensor(value);
      // For a view that is conjugated or negated on reading, the importer owns another tensor.
      if (!imported || !imported->numpy_type.empty() || !imported->owner.is(value)) {
        return std::nullopt;
      }
      const tensor::TensorRef& tensor = imported->tensor;
      if (!tensor.device.is_cpu() || tensor.dtype != wanted_[i].dtype ||
          tensor.shape != wanted_[i].shape ||
          !tensor::is_contiguous(tensor.shape, tensor.strides)) {
        return std::nullopt;
      }
      addresses.push_back(reinterpret_cast<std::uintptr_t>(tensor.data));
    }
  } catch (Exception&) {  // CUDA's
    return std::nullopt;
  } catch (nb::python_error&) {
    return std::nullopt;  // the caller finds out which, and why
  } catch (nb::builtin_exception&) {
    return std::nullopt;
  }
  return addresses;
}

void bind_tensor_layouts(nb::module_& m) {
  nb::class_<TensorLayouts>(m, "TensorLayouts",
                            "What the tensors of a list have to be: (shape, dtype) of each.")
      .def(nb::init<const std::vector<TensorLayouts::Layout>&>(), nb::arg("layouts"))
      .def("addresses", &TensorLayouts::addresses, nb::arg("tensors"),
           "Where the elements lie, 0 for None; None unless all are as they have to be, in host "
           "memory and without gaps.",
           nb::sig("def addresses(self, tensors: list[typing.Any]) -> list[int] | None"));
}

}  // namespace moolink::bind
