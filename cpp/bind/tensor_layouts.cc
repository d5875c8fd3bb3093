#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
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

  // The addresses of the elements, 0 for None; empty unless all have the required layout, in host
  // memory and without gaps.
  std::optional<std::vector<std::uintptr_t>> addresses(
      const nb::typed<nb::list, nb::any>& tensors) const {
    if (tensors.size() != wanted_.size()) return std::nullopt;
    std::vector<std::uintptr_t> addresses;
    addresses.reserve(wanted_.size());
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      const nb::handle value = tensors[i];
      if (value.is_none()) {
        addresses.push_back(0);
        continue;
      }
      const auto imported = try_import(value);
      // For a view that is conjugated or negated on reading, the importer owns another tensor.
      if (!imported || !imported->owner.is(value) || !wanted_[i].fits(*imported)) {
        return std::nullopt;
      }
      addresses.push_back(reinterpret_cast<std::uintptr_t>(imported->tensor.data));
    }
    return addresses;
  }

 private:
  struct Wanted {
    tensor::Shape shape;
    tensor::DType dtype;

    bool fits(const ImportedTensor& given) const {
      const tensor::TensorRef& tensor = given.tensor;
      return tensor.device.is_cpu() && tensor.dtype == dtype && tensor.shape == shape &&
             tensor.is_contiguous();
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
      .def("addresses", &TensorLayouts::addresses, nb::arg("tensors"),
           "Returns the address of each tensor's elements, 0 for None. Returns None if a tensor "
           "has another layout, has gaps or is not in host memory.");
}

}  // namespace moolink::bind
