#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/tensor.h"

namespace moolink::bind {
namespace {

// The required layouts of the tensors of a list, checked each time: users resize, move and replace
// them.
class TensorLayouts {
 public:
  using Layout = std::pair<tensor::Shape, std::string>;  // shape, dtype

  explicit TensorLayouts(const std::vector<Layout>& layouts) {
    for (const auto& [shape, name] : layouts) {
      wanted_.push_back({shape, dtype_named(name)});
    }
  }

  // Whether all have the required layout, in host memory and without gaps, or are None.
  bool fit(const nb::typed<nb::list, nb::any>& tensors) const {
    if (tensors.size() != wanted_.size()) return false;
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      const nb::object value = tensors[i];
      if (value.is_none()) continue;
      const auto imported = try_import(value);
      if (!imported || !wanted_[i].fits(*imported)) return false;
    }
    return true;
  }

 private:
  struct Wanted {
    tensor::Shape shape;
    tensor::DType dtype;

    bool fits(const ImportedTensor& given) const {
      const tensor::TensorRef& tensor = given.tensor;
      return given.copied == CopyReason::none && tensor.device.is_cpu() && tensor.dtype == dtype &&
             tensor.shape == shape && tensor.is_contiguous();
    }
  };
  std::vector<Wanted> wanted_;
};

}  // namespace

void bind_tensor_layouts(nb::module_& m) {
  nb::class_<TensorLayouts>(
      m, "TensorLayouts",
      "The layout that the tensors of a list must have: (shape, dtype) of each.")
      .def(nb::init<const std::vector<TensorLayouts::Layout>&>(), nb::arg("layouts"))
      .def("fit", &TensorLayouts::fit, nb::arg("tensors"),
           "Returns whether each tensor is None or has its layout, without gaps, in host memory, "
           "and is read where it lies.");
}

}  // namespace moolink::bind
