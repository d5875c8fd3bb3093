// Received memory as arrays of the frameworks.

#include <dlpack/dlpack.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/enum_names.h"
#include "bind/device.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/tensor.h"
#include "bind/tensor_kinds.h"
#include "wire/archive.h"

namespace moolink::bind {
namespace {

using tensor::DType;

// The owner of a received array's memory and layout. numpy reads it through the buffer protocol (as
// bytes: numpy gives them the dtype, because neither DLPack nor buffers know all of numpy's), the
// others through DLPack.
struct ReceivedTensor {
  MutableBuffer memory;
  DType dtype = DType::uint8;
  tensor::Shape shape;
  bool read_only = false;
};

// Both generations of DLPack's owning struct differ in the place of the tensor and in the version.
template <class Managed>
struct Export {
  // NOLINTNEXTLINE(bugprone-invalid-enum-default-initialization): new_export sets the device
  Managed managed{};
  std::shared_ptr<void> owner;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  // Called by frameworks on any thread, without the GIL.
  static void free(Managed* managed) { delete static_cast<Export*>(managed->manager_ctx); }
};

// `flags` and `minor` are for consumers of the versioned struct.
template <class Managed>
Managed* new_export(const ReceivedTensor& received, std::uint64_t flags = 0,
                    std::uint32_t minor = DLPACK_MINOR_VERSION) {
  auto exported = std::make_unique<Export<Managed>>();
  exported->owner = received.memory.owner();
  exported->shape = received.shape;
  exported->strides = tensor::contiguous_strides(received.shape);
  const tensor::DLPackType type = tensor::to_dlpack(received.dtype);
  DLTensor& tensor = exported->managed.dl_tensor;
  tensor.data = received.memory.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = static_cast<std::int32_t>(received.shape.size());
  tensor.dtype = {type.code, type.bits, type.lanes};
  tensor.shape = exported->shape.data();
  tensor.strides = exported->strides.data();
  tensor.byte_offset = 0;
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = Export<Managed>::free;
  if constexpr (std::is_same_v<Managed, DLManagedTensorVersioned>) {
    exported->managed.version = {DLPACK_MAJOR_VERSION, minor};
    exported->managed.flags = flags | (received.read_only ? DLPACK_FLAG_BITMASK_READ_ONLY : 0);
  }
  return &exported.release()->managed;
}

[[noreturn]] void refuse_export(const std::string& what) { throw nb::buffer_error(what.c_str()); }

void check_export(nb::handle stream, nb::handle device) {
  // -1: the consumer synchronises by itself.
  if (!stream.is_none() && nb::cast<std::int64_t>(stream) != -1) {
    refuse_export("this memory is on the CPU, where there are no streams: stream must be None");
  }
  if (device.is_none()) return;
  const auto [type, index] = nb::cast<std::pair<int, int>>(device);
  if (type != kDLCPU || index != 0) {
    refuse_export("this memory is on the CPU and is not moved to " +
                  tensor::Device{type, index}.name() + ": import it on the CPU first");
  }
}

// JAX asks without max_version and then takes the unversioned capsule only, which cannot mark
// memory as read-only.
nb::object dlpack(const ReceivedTensor& received, nb::handle stream, nb::handle max_version,
                  nb::handle device, nb::handle copy) {
  check_export(stream, device);
  const bool must_copy = copy.ptr() == Py_True;
  ReceivedTensor given = received;
  if (must_copy) given = {host_copy(received.memory.span()), received.dtype, received.shape};
  std::pair<std::uint32_t, std::uint32_t> newest{0, 0};
  if (!max_version.is_none()) newest = nb::cast<decltype(newest)>(max_version);
  if (newest.first >= DLPACK_MAJOR_VERSION) {
    const std::uint32_t minor = newest.first == DLPACK_MAJOR_VERSION
                                    ? std::min<std::uint32_t>(newest.second, DLPACK_MINOR_VERSION)
                                    : DLPACK_MINOR_VERSION;
    const std::uint64_t flags = must_copy ? DLPACK_FLAG_BITMASK_IS_COPIED : 0;
    return new_capsule(new_export<DLManagedTensorVersioned>(given, flags, minor));
  }
  if (given.read_only) {
    refuse_export(
        "lent memory is for reading only, which DLPack before 1.0 cannot say: ask with "
        "max_version=(1, 0) or copy=True");
  }
  return new_capsule(new_export<DLManagedTensor>(given));
}

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const ReceivedTensor* received = nb::inst_ptr<ReceivedTensor>(self);
  const MutableBuffer& memory = received->memory;
  return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.size()),
                           received->read_only ? 1 : 0, flags);
}

PyType_Slot received_tensor_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
    {0, nullptr},
};

nb::object numpy_attribute(const char* name) { return nb::module_::import_("numpy").attr(name); }

// numpy's dtype object; kept once made, because numpy keeps them too.
nb::object numpy_dtype(const wire::TensorHead& head) {
  if (!head.numpy_type.empty()) return numpy_attribute("dtype")(head.numpy_type.c_str());
  static PyObject* known[tensor::kDTypes] = {};
  PyObject*& slot = known[static_cast<std::size_t>(head.dtype)];
  if (slot != nullptr) return nb::borrow(slot);
  const std::string name(tensor::dtype_name(head.dtype));
  nb::object dtype;
  if (tensor::is_native_to_numpy(head.dtype)) {
    dtype = numpy_attribute("dtype")(name.c_str());
  } else {
    try {
      dtype = numpy_attribute("dtype")(nb::module_::import_("ml_dtypes").attr(name.c_str()));
    } catch (nb::python_error& e) {
      if (!e.matches(PyExc_ImportError) && !e.matches(PyExc_AttributeError)) throw;
      throw Exception(ErrorCode::wire,
                      "an array of " + name +
                          " has no numpy dtype here: install ml_dtypes, or import torch or jax "
                          "before it arrives");
    }
  }
  slot = nb::object(dtype).release().ptr();
  return dtype;
}

nb::object shape_tuple(const tensor::Shape& shape) {
  nb::object tuple = own(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  for (std::size_t i = 0; i < shape.size(); ++i) {
    PyObject* size = own(PyLong_FromLongLong(shape[i])).release().ptr();
    NB_TUPLE_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), size);
  }
  return tuple;
}

// numpy raises when such an element is read, wherever that is.
void check_characters(std::span<const std::byte> memory) {
  constexpr char32_t kLast = 0x10ffff;
  for (std::size_t i = 0; i + sizeof(char32_t) <= memory.size(); i += sizeof(char32_t)) {
    char32_t character = 0;
    std::memcpy(&character, memory.data() + i, sizeof(character));
    if (character > kLast) {
      throw Exception(ErrorCode::wire,
                      "a received array of strings has an element that is no "
                      "character");
    }
  }
}

nb::object to_numpy(ReceivedTensor received, const wire::TensorHead& head) {
  if (head.numpy_type.starts_with("<U")) {
    check_characters({received.memory.data(), received.memory.size()});
  }
  const nb::object dtype = numpy_dtype(head);
  const nb::object shape = shape_tuple(head.shape);
  // Importing a loaded module costs as much as the rest of this function.
  static PyObject* ndarray = nullptr;
  if (ndarray == nullptr) ndarray = numpy_attribute("ndarray").release().ptr();
  // The constructor numpy.ndarray(shape, dtype, buffer) makes a view that keeps the buffer alive.
  return nb::handle(ndarray)(shape, dtype, nb::cast(std::move(received)));
}

// Null: a torch from before the exchange API. The table lives as long as torch.
const DLPackExchangeAPI* torch_api(nb::handle torch) {
  static const DLPackExchangeAPI* api = nullptr;
  if (api == nullptr) api = exchange_api(torch.attr("Tensor"));
  return api;
}

nb::object to_torch(const ReceivedTensor& received, nb::handle torch) {
  const DLPackExchangeAPI* api = torch_api(torch);
  if (api == nullptr) return torch.attr("from_dlpack")(nb::cast(received));
  void* tensor = nullptr;
  // Takes over the export, also on failure.
  if (api->managed_tensor_to_py_object_no_sync(new_export<DLManagedTensorVersioned>(received),
                                               &tensor) != 0) {
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(tensor));
}

nb::object to_jax(ReceivedTensor received, nb::handle jax) {
  const bool is_wide = received.dtype == DType::int64 || received.dtype == DType::uint64 ||
                       received.dtype == DType::float64 || received.dtype == DType::complex128;
  if (is_wide && !nb::cast<bool>(jax.attr("config").attr("jax_enable_x64"))) {
    throw Exception(ErrorCode::wire,
                    "a received array of " + std::string(tensor::dtype_name(received.dtype)) +
                        " would lose half of its bits in JAX: call "
                        "jax.config.update(\"jax_enable_x64\", True), or ask for arrays=\"numpy\"");
  }
  return nb::module_::import_("jax.dlpack").attr("from_dlpack")(nb::cast(std::move(received)));
}

ArrayKind kind_of_sender(wire::Framework framework) {
  switch (framework) {
    case wire::Framework::torch:
      return ArrayKind::torch;
    case wire::Framework::jax:
      return ArrayKind::jax;
    default:
      return ArrayKind::numpy;
  }
}

}  // namespace

ArrayKind parse_array_kind(std::string_view text) {
  return value_named(enum_names<ArrayKind::jax>("same", "numpy", "torch", "jax"), text,
                     "arrays must be \"same\", \"numpy\", \"torch\" or \"jax\", not \"", "\"");
}

ArrayKind array_kind(const wire::TensorHead& head, ArrayKind asked) {
  if (!head.numpy_type.empty()) return ArrayKind::numpy;
  if (asked != ArrayKind::same) return asked;
  const ArrayKind kind = kind_of_sender(head.framework);
  if (kind == ArrayKind::torch && loaded("torch", "from_dlpack").is_valid()) return kind;
  if (kind == ArrayKind::jax && loaded("jax", "Array").is_valid()) return kind;
  return ArrayKind::numpy;
}

nb::object export_tensor(MutableBuffer memory, const wire::TensorHead& head, ArrayKind kind,
                         bool read_only) {
  ReceivedTensor received{std::move(memory), head.dtype, head.shape};
  switch (array_kind(head, kind)) {
    case ArrayKind::torch:
      return to_torch(received, nb::module_::import_("torch"));
    case ArrayKind::jax:
      return to_jax(std::move(received), nb::module_::import_("jax"));
    case ArrayKind::numpy:
    case ArrayKind::same:
      break;
  }
  received.read_only = read_only;
  return to_numpy(std::move(received), head);
}

nb::object export_bytes(MutableBuffer memory) {
  const wire::TensorHead head{
      wire::Framework::numpy, DType::uint8, {}, {static_cast<std::int64_t>(memory.size())}};
  return export_tensor(std::move(memory), head, ArrayKind::numpy);
}

namespace {

nb::object view_of(const ImportedTensor& from) {
  const auto [begin, size] = from.span();
  ReceivedTensor memory{{std::make_shared<Reference>(from.owner), from.tensor.data + begin, size},
                        DType::uint8,
                        {static_cast<std::int64_t>(size)},
                        from.tensor.read_only};
  const wire::TensorHead head = from.head();
  tensor::Shape strides = from.tensor.strides;
  for (std::int64_t& stride : strides) stride *= static_cast<std::int64_t>(from.item_size());
  const nb::object dtype = numpy_dtype(head);
  if (size == 0) return numpy_attribute("empty")(shape_tuple(head.shape), dtype);
  return numpy_attribute("ndarray")(shape_tuple(head.shape), dtype, nb::cast(std::move(memory)),
                                    -begin, shape_tuple(strides));
}

// Empty: it is in host memory.
MutableBuffer copy_from_device(const ImportedTensor& from) {
  if (from.stream == nullptr) return {};
  const MutableBuffer copy = HeapAllocator().allocate(from.bytes());
  const GilRelease released;
  copy_elements(from, copy.data());
  return copy;
}

}  // namespace

nb::object as_array(nb::handle value) {
  const nb::object ndarray = numpy_attribute("ndarray");
  if (value.type().is(ndarray)) return nb::borrow(value);
  std::optional<ImportedTensor> imported = import_tensor(value);
  if (!imported) imported = import_numbers(value);
  if (!imported->owner.type().is(ndarray)) {
    const MutableBuffer copy = copy_from_device(*imported);
    try {
      if (imported->stream == nullptr) return view_of(*imported);
      return export_tensor(copy, imported->head(), ArrayKind::numpy, true);
    } catch (const Exception& e) {
      throw nb::type_error(e.what());
    }
  }
  if (!imported->tensor.read_only ||
      !nb::cast<bool>(imported->owner.attr("flags").attr("writeable"))) {
    return imported->owner;
  }
  nb::object view = imported->owner.attr("view")();
  view.attr("flags").attr("writeable") = false;
  return view;
}

nb::object export_scalar(std::span<const std::byte> value, const wire::TensorHead& head) {
  const nb::object bytes = nb::bytes(reinterpret_cast<const char*>(value.data()), value.size());
  // When numpy reads a string from memory, it ends with its last character that is not NUL; as a
  // scalar it keeps its NULs.
  const char kind = head.numpy_type.empty() ? 'x' : head.numpy_type[1];
  if (kind == 'S') return numpy_attribute("bytes_")(bytes);
  if (kind == 'U') {
    return numpy_attribute("str_")(bytes.attr("decode")("utf-32-le", "surrogatepass"));
  }
  return numpy_attribute("frombuffer")(bytes, numpy_dtype(head))[0];
}

void bind_tensors(nb::module_& m) {
  nb::class_<ReceivedTensor>(m, "ReceivedTensor", nb::type_slots(received_tensor_slots),
                             "The memory of a received array. The numpy, torch and JAX arrays that "
                             "moolink returns keep it alive.")
      .def(
          "__dlpack__", &dlpack, nb::kw_only(), nb::arg("stream") = nb::none(),
          nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
          nb::arg("copy") = nb::none(),
          nb::sig("def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[int, int] "
                  "| None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = "
                  "None) -> typing.Any"))
      .def("__dlpack_device__",
           [](const ReceivedTensor&) { return std::pair<int, int>(kDLCPU, 0); });
  m.def("as_array", &as_array, nb::arg("tensor"),
        "Returns a numpy view of a tensor of any framework, or a copy if the tensor is on a CUDA "
        "device. The view is read-only if the tensor must not be written.",
        nb::sig("def as_array(tensor: typing.Any) -> numpy.typing.NDArray[typing.Any]"));
  m.def("check_array", &check_array, nb::arg("value").none(), nb::arg("name"),
        "Returns whether a value is an array or tensor. Raises TypeError, with `name` first, if it "
        "is one whose elements cannot be read as plain memory.");
}

}  // namespace moolink::bind
