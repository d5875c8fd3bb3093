#include "bind/tensor.h"

#include <dlpack/dlpack.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "bind/errors.h"
#include "bind/tensor_kinds.h"
#include "bind/torch_memory.h"

namespace moolink::bind {
namespace {

using tensor::DType;
using wire::Framework;

[[noreturn]] void refuse_device(nb::handle value, const std::string& device) {
  type_error("a " + type_text(value) + " on " + device +
             " cannot be read: only tensors of the CPU and of CUDA devices can; move it to the CPU "
             "first");
}

// Null: the memory is the host's.
std::shared_ptr<device::Stream> stream_for(nb::handle value, const tensor::Device& device) {
  if (device.is_cpu()) return nullptr;
  if (!device::is_cuda(device)) refuse_device(value, device.name());
  try {
    return device::Devices::process().stream(device.index);
  } catch (const Exception& e) {
    throw Exception(e.error().code, "a " + type_text(value) + " on " + device.name() +
                                        " cannot be read: " + e.error().message);
  }
}

// numpy's element type: a DType, or a description of a type that only numpy has.
struct NumpyType {
  DType dtype = DType::uint8;
  std::string description;
  bool native = true;
};

NumpyType describe_numpy_type(nb::handle dtype) {
  const auto name = nb::cast<std::string>(dtype.attr("name"));
  const auto item_size = nb::cast<std::size_t>(dtype.attr("itemsize"));
  NumpyType type;
  type.native = nb::cast<bool>(dtype.attr("isnative"));
  if (const auto known = tensor::dtype_from_name(name);
      known && tensor::item_size(*known) == item_size) {
    type.dtype = *known;
    return type;
  }
  type.description = nb::cast<std::string>(dtype.attr("str"));
  if (!type.native) type.description[0] = '<';
  if (wire::numpy_item_size(type.description) != item_size) {
    type_error("numpy values of dtype " + text_of(dtype) +
               " cannot be sent: only bool, integers, floating point, complex, dates, durations "
               "and fixed-length strings can; send the parts of a structure one by one");
  }
  return type;
}

const NumpyType& numpy_type(nb::handle dtype) {
  static auto& known = *new std::unordered_map<PyObject*, NumpyType>();
  static auto& last = *new NumpyType();
  if (const auto found = known.find(dtype.ptr()); found != known.end()) return found->second;
  last = describe_numpy_type(dtype);
  // The dtypes of numbers are few and live as long as numpy; others are made for each array.
  constexpr std::size_t kMostDtypes = 64;
  if (!last.description.empty() || known.size() == kMostDtypes) return last;
  Py_INCREF(dtype.ptr());
  return known.emplace(dtype.ptr(), last).first->second;
}

// A copy made here is read-only: writes to it would not reach the tensor.
ImportedTensor as_copy(ImportedTensor imported, CopyReason reason) {
  imported.copied = reason;
  imported.tensor.read_only = true;
  return imported;
}

ImportedTensor import_numpy(nb::object array) {
  const nb::object dtype = array.attr("dtype");
  const NumpyType& type = numpy_type(dtype);
  if (!type.native) {
    // Not astype: for dates without a unit it would use the array's own type.
    const nb::object native = dtype.attr("newbyteorder")("=");
    return as_copy(import_numpy(array.attr("byteswap")().attr("view")(native)),
                   CopyReason::byte_order);
  }
  ImportedTensor imported;
  imported.framework = Framework::numpy;
  imported.numpy_type = type.description;
  imported.tensor.dtype = type.dtype;
  if (imported.item_size() == 0) {
    type_error("numpy arrays of dtype " + text_of(dtype) +
               " cannot be sent: their elements have no bytes; convert them to a longer one");
  }
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_STRIDES) != 0) throw nb::python_error();
  bool whole_strides = true;
  const auto item = static_cast<Py_ssize_t>(imported.item_size());
  for (int i = 0; i < view.ndim; ++i) {
    imported.tensor.shape.push_back(view.shape[i]);
    imported.tensor.strides.push_back(view.strides[i] / item);
    whole_strides = whole_strides && view.strides[i] % item == 0;
  }
  imported.tensor.data = static_cast<std::byte*>(view.buf);
  imported.tensor.read_only = view.readonly != 0;
  // numpy's memory stays while the array lives, whether a view of it is held or not.
  PyBuffer_Release(&view);
  // A field of a structured array may have a stride that is no multiple of its own size.
  if (!whole_strides) return as_copy(import_numpy(array.attr("copy")()), CopyReason::gaps);
  imported.owner = std::move(array);
  return imported;
}

void take_layout(const DLTensor& from, ImportedTensor& imported) {
  imported.tensor.data = static_cast<std::byte*>(from.data) + from.byte_offset;
  imported.tensor.shape.assign(from.shape, from.shape + from.ndim);
  if (from.strides == nullptr) {
    imported.tensor.strides = tensor::contiguous_strides(imported.tensor.shape);
  } else {
    imported.tensor.strides.assign(from.strides, from.strides + from.ndim);
  }
  imported.tensor.device = {from.device.device_type, from.device.device_id};
  if (from.data == nullptr && tensor::element_count(imported.tensor.shape) != 0U) {
    type_error("a tensor of shape " + tensor::shape_text(imported.tensor.shape) +
               " has no memory: its storage was freed (resize_(0)), or it only stands for its "
               "values; send a clone that holds them");
  }
}

// The importer of a capsule that is not renamed: its destructor frees the tensor with the last
// reference, so the capsule is the owner.
ImportedTensor import_capsule(nb::handle value, nb::object capsule,
                              std::shared_ptr<device::Stream> stream) {
  ImportedTensor imported;
  imported.stream = std::move(stream);
  const DLTensor* tensor = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != DLPACK_MAJOR_VERSION) {
      type_error("a " + type_text(value) + " speaks DLPack " +
                 std::to_string(managed->version.major) + ", which this moolink does not");
    }
    tensor = &managed->dl_tensor;
    imported.tensor.read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    tensor = &static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))
                  ->dl_tensor;
  } else {
    type_error("__dlpack__ of a " + type_text(value) + " did not return a DLPack capsule");
  }
  take_layout(*tensor, imported);
  if (imported.tensor.device.is_cpu() != (imported.stream == nullptr)) {
    refuse_device(value, imported.tensor.device.name());
  }
  const tensor::DLPackType type{tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes};
  const auto dtype = tensor::from_dlpack(type);
  if (!dtype) {
    type_error("a " + type_text(value) + " of " + tensor::dlpack_name(type) + " on " +
               imported.tensor.device.name() +
               " cannot be read: only bool, integers and floating point of 8 bits and more and "
               "complex can; convert it to one of them");
  }
  imported.tensor.dtype = *dtype;
  imported.owner = std::move(capsule);
  return imported;
}

// The stream for memory of a framework that queues work on its own stream; null: the host's.
std::shared_ptr<device::Stream> stream_after(nb::handle value, const DLDevice& device,
                                             const DLPackExchangeAPI* api) {
  auto stream = stream_for(value, {device.device_type, device.device_id});
  if (stream == nullptr) return nullptr;
  void* producer = nullptr;
  if (api->current_work_stream(device.device_type, device.device_id, &producer) != 0) {
    throw nb::python_error();
  }
  stream->follow(producer);
  return stream;
}

// Without calling Python: through the functions of the framework's type.
ImportedTensor import_exchanged(nb::handle value, const DLPackExchangeAPI* api) {
  DLManagedTensorVersioned* managed = nullptr;
  if (api->managed_tensor_from_py_object_no_sync(value.ptr(), &managed) != 0) {
    throw nb::python_error();
  }
  if (managed == nullptr) type_error("a " + type_text(value) + " exports no tensor");
  nb::object owner = new_capsule(managed);
  return import_capsule(value, std::move(owner),
                        stream_after(value, managed->dl_tensor.device, api));
}

std::pair<int, int> dlpack_device(nb::handle value) {
  const nb::object device = value.attr("__dlpack_device__")();
  std::pair<int, int> result;
  if (!nb::try_cast(device, result)) {
    type_error("__dlpack_device__ of a " + type_text(value) +
               " did not return a device's type and number, two integers");
  }
  return result;
}

ImportedTensor import_dlpack(nb::handle value) {
  const auto [device_type, device_id] = dlpack_device(value);
  std::shared_ptr<device::Stream> stream = stream_for(value, {device_type, device_id});
  const nb::object exporter = value.attr("__dlpack__");
  nb::dict arguments;
  // The producer makes this stream wait for the work that computes the tensor.
  if (stream != nullptr) arguments["stream"] = stream->handle();
  nb::object capsule;
  try {
    capsule = exporter(nb::arg("max_version") = nb::make_tuple(1, 3), **arguments);
  } catch (nb::python_error& e) {
    // Exporters from before DLPack 1.0 do not know the argument.
    if (!e.matches(PyExc_TypeError)) throw;
    capsule = exporter(**arguments);
  }
  return import_capsule(value, std::move(capsule), std::move(stream));
}

DType torch_dtype(nb::handle tensor) {
  const nb::object dtype = tensor.attr("dtype");
  // torch's dtypes are few and live as long as torch.
  static auto& known = *new std::unordered_map<PyObject*, DType>();
  if (const auto found = known.find(dtype.ptr()); found != known.end()) return found->second;
  const std::string text = text_of(dtype);  // "torch.float32"
  const auto found = tensor::dtype_from_name(std::string_view(text).substr(text.find('.') + 1));
  if (!found) {
    type_error("a " + type_text(tensor) + " of " + text +
               " cannot be read; convert it to another dtype");
  }
  known.emplace(dtype.ptr(), *found);
  return *found;
}

bool call_is_true(nb::handle value, const char* method) {
  return nb::cast<bool>(value.attr(method)());
}

// Views that are conjugated or negated on reading have other values than their memory; torch's own
// export does not check negated ones.
bool resolve_views(nb::object& value, DType dtype) {
  bool resolved = false;
  if (tensor::is_complex(dtype) && call_is_true(value, "is_conj")) {
    value = value.attr("resolve_conj")();
    resolved = true;
  }
  const bool may_be_negated = tensor::is_complex(dtype) || tensor::is_floating(dtype);
  if (may_be_negated && call_is_true(value, "is_neg")) {
    value = value.attr("resolve_neg")();
    resolved = true;
  }
  return resolved;
}

void require_torch_device(nb::handle value) {
  if (nb::cast<bool>(value.attr("is_cpu")) || nb::cast<bool>(value.attr("is_cuda"))) return;
  // DLPack has no code for some of torch's devices (meta).
  refuse_device(value, text_of(value.attr("device")));
}

ImportedTensor import_torch(nb::object value, const TypeKind& kind) {
  value = plain_torch(std::move(value), kind.importer);
  const DType dtype = torch_dtype(value);
  require_torch_device(value);
  nb::object storage = torch_storage(value);
  CopyReason copied = resolve_views(value, dtype) ? CopyReason::lazy_view : CopyReason::none;
  if (nb::cast<bool>(value.attr("is_cuda"))) {  // gaps are removed on the device
    nb::object compact = value.attr("contiguous")();
    if (copied == CopyReason::none && !compact.is(value)) copied = CopyReason::gaps;
    value = std::move(compact);
  }
  if (copied != CopyReason::none) storage = torch_storage(value);
  ImportedTensor imported;
  if (kind.api != nullptr && kind.api->dltensor_from_py_object_no_sync != nullptr) {
    const DLTensor tensor = torch_description(value, kind.api, storage);
    take_layout(tensor, imported);
    imported.stream = stream_after(value, tensor.device, kind.api);
    // Another thread may replace the tensor's storage meanwhile.
    imported.owner = std::move(storage);
  } else {
    imported = import_dlpack(value.attr("detach")());
  }
  imported.tensor.dtype = dtype;
  imported.framework = Framework::torch;
  return copied == CopyReason::none ? imported : as_copy(std::move(imported), copied);
}

struct JaxPlace {
  std::size_t devices = 0;
  bool on_cuda = false;
};

JaxPlace place_of(nb::handle array) {
  JaxPlace place;
  for (const nb::handle device : nb::iter(array.attr("devices")())) {
    ++place.devices;
    const auto platform = nb::cast<std::string>(device.attr("platform"));
    if (platform == "gpu" || platform == "cuda") {
      place.on_cuda = true;
    } else if (platform != "cpu") {
      type_error("a jax.Array on " + platform +
                 " cannot be read: only arrays of CPUs and CUDA devices can; call jax.device_get "
                 "first");
    }
  }
  if (place.on_cuda && place.devices > 1) {
    type_error("a jax.Array on " + std::to_string(place.devices) +
               " devices cannot be read; call jax.device_get first");
  }
  return place;
}

void require_readable_jax(nb::handle value) {
  if (nb::cast<bool>(value.attr("is_deleted")())) {
    type_error("a " + type_text(value) +
               " that was deleted or donated cannot be read: keep a copy, or read it before");
  }
  if (!nb::cast<bool>(value.attr("is_fully_addressable"))) {
    type_error("a " + type_text(value) +
               " lies partly on devices of other processes and cannot be read: give the data of "
               "its addressable_shards");
  }
  // Other programs do not know the elements of JAX's own dtypes.
  if (!nb::isinstance(value.attr("dtype"), loaded("numpy", "dtype"))) {
    type_error("a " + type_text(value) + " of " + text_of(value.attr("dtype")) +
               " cannot be read: give jax.random.key_data() of a typed random key");
  }
}

ImportedTensor import_jax(nb::handle value) {
  require_readable_jax(value);
  const JaxPlace place = place_of(value);
  ImportedTensor imported =
      place.on_cuda ? import_dlpack(value)
                    : import_numpy(nb::module_::import_("numpy").attr("asarray")(value));
  imported.framework = Framework::jax;
  // Immutable by type, which neither its capsules nor all versions of its views report.
  imported.tensor.read_only = true;
  if (place.devices > 1) imported.copied = CopyReason::several_parts;
  return imported;
}

ImportedTensor import_cupy(nb::object value) {
  const bool compact = nb::cast<bool>(value.attr("flags").attr("c_contiguous"));
  if (!compact) {
    value = nb::module_::import_("moolink.data.device_arrays").attr("cupy_contiguous")(value);
  }
  ImportedTensor imported = import_dlpack(value);
  imported.framework = Framework::cupy;
  if (!compact) imported.copied = CopyReason::gaps;
  return imported;
}

[[noreturn]] void refuse_wrapper(nb::handle value) {
  const char* remedy = "give the plain tensors that it is made of, or a plain one of its values";
  if (nb::hasattr(value.type(), "to_local")) {
    remedy = "give its local shard, to_local(), or all of it, full_tensor()";
  } else if (nb::hasattr(value.type(), "get_data")) {
    remedy = "give its data and its mask, get_data() and get_mask()";
  }
  type_error("a " + type_text(value) +
             " is more than its elements, or has none in memory: " + remedy);
}

// Raises TypeError for types whose objects are never read.
void require_readable_type(nb::handle value, Importer importer) {
  switch (importer) {
    case Importer::traced:
      type_error("a " + type_text(value) +
                 " is a traced JAX value and has no elements yet: call moolink outside of jit, "
                 "grad and vmap, or moolink.jax.all_reduce inside of them");
    case Importer::numpy_subclass:
      type_error("a " + type_text(value) +
                 " is more than its elements; convert it to a plain array first (numpy.asarray; "
                 "the data and the mask of a masked array)");
    case Importer::torch_wrapper:
      refuse_wrapper(value);
    case Importer::uninitialized:
      type_error("a " + type_text(value) +
                 " has no shape and no elements yet: call its lazy module once before");
    default:
      return;
  }
}

void require_readable_torch(nb::handle given, const TypeKind& kind) {
  const nb::object value = plain_torch(nb::borrow(given), kind.importer);
  if (nb::cast<bool>(value.attr("is_quantized"))) {
    type_error("a " + type_text(value) + " of " + text_of(value.attr("dtype")) +
               " is more than its elements: give dequantize() of it, or int_repr() and its scales");
  }
  if (nb::cast<bool>(value.attr("is_meta"))) refuse_device(value, "meta");
  torch_dtype(value);  // raises for elements that no message can hold, such as complex32's
  const nb::object storage = torch_storage(value);
  if (kind.api != nullptr && kind.api->dltensor_from_py_object_no_sync != nullptr &&
      nb::cast<bool>(value.attr("is_cpu"))) {
    torch_description(value, kind.api, storage);
  }
}

}  // namespace

std::optional<ImportedTensor> import_tensor(nb::handle value) {
  const TypeKind kind = kind_of(value);
  switch (kind.importer) {
    case Importer::numpy:
      return import_numpy(nb::borrow(value));
    case Importer::torch:
    case Importer::torch_subclass:
      return import_torch(nb::borrow(value), kind);
    case Importer::jax:
      return import_jax(value);
    case Importer::cupy:
      return import_cupy(nb::borrow(value));
    case Importer::dlpack:
      return kind.api == nullptr ? import_dlpack(value) : import_exchanged(value, kind.api);
    default:
      require_readable_type(value, kind.importer);
      return std::nullopt;
  }
}

bool check_array(nb::handle value, const std::string& name) {
  const TypeKind kind = kind_of(value);
  try {
    switch (kind.importer) {
      case Importer::torch:
      case Importer::torch_subclass:
        require_readable_torch(value, kind);
        break;
      case Importer::jax:
        require_readable_jax(value);
        break;
      default:
        require_readable_type(value, kind.importer);
    }
  } catch (nb::builtin_exception& e) {
    type_error(name + ": " + e.what());
  }
  return kind.importer != Importer::none;
}

ImportedTensor import_numbers(nb::handle value) {
  std::optional<ImportedTensor> imported = import_tensor(value);
  if (!imported && PyObject_CheckBuffer(value.ptr()) != 0) {
    imported = import_numpy(nb::module_::import_("numpy").attr("asarray")(
        nb::steal(PyMemoryView_FromObject(value.ptr()))));
  }
  if (!imported) type_error("expected a tensor or array, not a " + type_text(value));
  if (imported->stream != nullptr) {
    type_error("expected a tensor in host memory, not a " + type_text(value) + " of " +
               std::string(tensor::dtype_name(imported->tensor.dtype)) + " on " +
               imported->tensor.device.name() + ": move it to the CPU first");
  }
  if (!imported->numpy_type.empty()) {
    type_error("expected a tensor of numbers, not of numpy's " + imported->numpy_type);
  }
  return std::move(*imported);
}

std::optional<ImportedTensor> try_import(nb::handle value) {
  try {
    auto imported = import_tensor(value);
    return imported && imported->numpy_type.empty() ? std::move(imported) : std::nullopt;
  } catch (const Exception&) {  // CUDA's
    return std::nullopt;
  } catch (nb::python_error&) {
    return std::nullopt;
  } catch (nb::builtin_exception&) {
    return std::nullopt;
  }
}

std::optional<wire::TensorHead> import_scalar(nb::handle value, std::string& bytes) {
  static PyObject* generic = nullptr;
  if (generic == nullptr) {
    generic = loaded("numpy", "generic").release().ptr();
    if (generic == nullptr) return std::nullopt;
  }
  if (PyObject_TypeCheck(value.ptr(), reinterpret_cast<PyTypeObject*>(generic)) == 0) {
    return std::nullopt;
  }
  const nb::object dtype = value.attr("dtype");
  const NumpyType& type = numpy_type(dtype);
  wire::TensorHead head{Framework::numpy, type.dtype, type.description, {}};
  // A subclass means something else, and would lose that on its way.
  if (!value.type().is(dtype.attr("type"))) return std::nullopt;
  const nb::bytes raw = nb::cast<nb::bytes>(value.attr("tobytes")());
  // The empty string occupies one byte or four in memory.
  bytes.assign(raw.c_str(), std::min(raw.size(), head.item_size()));
  return head;
}

}  // namespace moolink::bind
