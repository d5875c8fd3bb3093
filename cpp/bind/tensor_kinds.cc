#include "bind/tensor_kinds.h"

#include <unordered_map>

namespace moolink::bind {

nb::object loaded(const char* module, const char* attribute) {
  PyObject* found = PyDict_GetItemString(PyImport_GetModuleDict(), module);  // borrowed
  return found == nullptr ? nb::object() : nb::getattr(nb::borrow(found), attribute, nb::object());
}

const DLPackExchangeAPI* exchange_api(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_CheckExact(capsule.ptr())) return nullptr;
  const void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const DLPackExchangeAPI*>(pointer);
  return api->header.version.major == DLPACK_MAJOR_VERSION ? api : nullptr;
}

namespace {

bool is_subclass(nb::handle type, const char* module, const char* attribute) {
  const nb::object base = loaded(module, attribute);
  if (!base.is_valid() || base.is_none()) return false;
  const int result = PyObject_IsSubclass(type.ptr(), base.ptr());
  if (result < 0) throw nb::python_error();
  return result == 1;
}

bool is_type(nb::handle type, const char* module, const char* attribute) {
  return loaded(module, attribute).is(type);
}

Importer torch_importer(nb::handle type) {
  if (is_type(type, "torch", "Tensor") || is_type(type, "torch.nn.parameter", "Parameter")) {
    return Importer::torch;
  }
  if (is_subclass(type, "torch.nn.parameter", "UninitializedTensorMixin")) {
    return Importer::uninitialized;
  }
  // A type with a dispatch of its own computes its values, mostly from other tensors.
  const nb::object plain = loaded("torch", "Tensor").attr("__torch_dispatch__");
  return type.attr("__torch_dispatch__").is(plain) ? Importer::torch_subclass
                                                   : Importer::torch_wrapper;
}

TypeKind classify(nb::handle type) {
  if (is_subclass(type, "numpy", "ndarray")) {
    const bool plain = is_type(type, "numpy", "ndarray") || is_type(type, "numpy", "memmap");
    return {plain ? Importer::numpy : Importer::numpy_subclass, nullptr};
  }
  if (is_subclass(type, "torch", "Tensor")) return {torch_importer(type), exchange_api(type)};
  if (is_subclass(type, "jax.core", "Tracer")) return {Importer::traced, nullptr};
  if (is_subclass(type, "jax", "Array")) return {Importer::jax, nullptr};
  if (is_subclass(type, "cupy", "ndarray")) return {Importer::cupy, nullptr};
  const DLPackExchangeAPI* api = exchange_api(type);
  const bool exports = api != nullptr || nb::hasattr(type, "__dlpack__");
  return {exports ? Importer::dlpack : Importer::none, api};
}

}  // namespace

std::string first_line(const nb::python_error& error) {
  const std::string whole = text_of(error.value());
  return whole.substr(0, whole.find('\n'));
}

// Types seen so far. Only types that import tensors are kept, with a reference each, so that the
// table does not grow with every class of a program and an address never means another type.
TypeKind kind_of(nb::handle value) {
  static auto& kinds = *new std::unordered_map<PyObject*, TypeKind>();
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
  if (const auto known = kinds.find(type); known != kinds.end()) return known->second;
  const TypeKind kind = classify(type);
  if (kind.importer != Importer::none) {
    Py_INCREF(type);
    kinds.emplace(type, kind);
  }
  return kind;
}

}  // namespace moolink::bind
