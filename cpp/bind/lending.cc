#include "bind/lending.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/tensor.h"
#include "bind/user_code.h"

namespace moolink::bind {
namespace {

PyObject* lent_type = nullptr;  // lives as long as the module

nb::any empty(const tensor::Shape& shape, const std::string& dtype, std::string_view arrays) {
  const auto type = tensor::dtype_from_name(dtype);
  if (!type) type_error("arrays of dtype '" + dtype + "' cannot be sent");
  const ArrayKind kind = parse_array_kind(arrays);
  if (kind != ArrayKind::numpy && kind != ArrayKind::torch) {
    throw nb::value_error("arrays must be \"numpy\" or \"torch\": others cannot be written");
  }
  const auto bytes = tensor::byte_size(tensor::item_size(*type), shape);
  if (!bytes) value_error("no array has shape " + tensor::shape_text(shape));
  MutableBuffer memory = default_context()->lending().allocate(static_cast<std::size_t>(*bytes));
  return nb::borrow<nb::any>(
      export_tensor(std::move(memory), {wire::Framework::numpy, *type, {}, shape}, kind));
}

using Block = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// This many blocks of a size rotate, so that a reused block is not cached any more.
constexpr std::size_t kBlocksInTurn = 4;

void fill_block(const Block& block, const nb::list& arrays,
                const std::vector<std::size_t>& offsets) {
  if (arrays.size() != offsets.size()) throw nb::value_error("each array needs its offset");
  std::vector<ImportedTensor> given;
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    given.push_back(import_numbers(arrays[i]));
    if (offsets[i] > block.size() || given.back().bytes() > block.size() - offsets[i]) {
      throw nb::value_error("the block has no room for the array");
    }
  }
  copy_unlocked(block.size(), [&] {
    for (std::size_t i = 0; i < given.size(); ++i) {
      std::byte* to = reinterpret_cast<std::byte*>(block.data()) + offsets[i];
      copy_elements_past_cache(given[i], to, kBlocksInTurn * block.size());
    }
  });
}

}  // namespace

const PyLent* PyLent::of(nb::handle object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == lent_type
             ? nb::inst_ptr<PyLent>(object)
             : nullptr;
}

std::shared_ptr<const void> PyLent::release(std::shared_ptr<runtime::Context> context) const {
  if (on_release_.is_none()) return nullptr;
  return runtime::on_release(std::move(context), nullptr,
                             [callback = Reference(on_release_)] { call_back(callback.borrow()); });
}

int PyLent::traverse(visitproc visit, void* arg) const {
  Py_VISIT(value_.ptr());
  Py_VISIT(on_release_.ptr());
  return 0;
}

void PyLent::clear() {
  value_ = nb::none();
  on_release_ = nb::none();
}

void bind_lending(nb::module_& m) {
  auto lent =
      public_class<PyLent>(m, "moolink.rpc", "Lent", nb::type_slots(collected_slots<PyLent>),
                           "A value whose arrays are lent when it is sent; see moolink.lend.");
  lent.def(nb::init<nb::object, std::optional<nb::callable>>(), nb::arg("value").none(),
           nb::arg("on_release") = nb::none(),
           nb::sig("def __init__(self, value: typing.Any, on_release: typing.Callable[[], object] "
                   "| None = None) -> None"));
  lent_type = lent.ptr();
  m.def("empty", &empty, nb::arg("shape"), nb::arg("dtype"), nb::arg("arrays"),
        "See moolink.empty.");
  m.def("fill_block", &fill_block, nb::arg("block"), nb::arg("arrays"), nb::arg("offsets"),
        "Copies each array of numbers into a block that peers will read, at its offset in bytes.",
        nb::sig("def fill_block(block: numpy.typing.NDArray[numpy.uint8], arrays: "
                "list[numpy.typing.NDArray[typing.Any]], offsets: list[int]) -> None"));
}

}  // namespace moolink::bind
