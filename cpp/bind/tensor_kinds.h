#pragma once

// How a tensor is imported, by its type.

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

#include <string>
#include <type_traits>

#include "bind/errors.h"

namespace moolink::bind {

namespace nb = nanobind;

// An attribute of a module; empty if the module was not imported before, or lacks it. An import
// here would be unexpected.
nb::object loaded(const char* module, const char* attribute);

// DLPack's functions for a type of tensors; null: it has none, or others than moolink knows.
const DLPackExchangeAPI* exchange_api(nb::handle type);

// The capsule that owns an export until a consumer takes it.
template <class Managed>
nb::object new_capsule(Managed* exported) {
  static constexpr const char* kName =
      std::is_same_v<Managed, DLManagedTensorVersioned> ? "dltensor_versioned" : "dltensor";
  PyObject* capsule = PyCapsule_New(exported, kName, [](PyObject* dropped) {
    // A consumer that took the tensor renamed the capsule, and frees it itself.
    if (PyCapsule_IsValid(dropped, kName) == 0) return;
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(dropped, kName));
    if (managed->deleter != nullptr) managed->deleter(managed);
  });
  if (capsule == nullptr && exported->deleter != nullptr) exported->deleter(exported);
  return own(capsule);
}

// How objects of a type are imported; determined once per type.
enum class Importer {
  none,
  numpy,
  torch,
  torch_subclass,  // its memory is a plain tensor's
  jax,
  cupy,
  dlpack,
  // Refused:
  numpy_subclass,  // may be more than its elements, as a masked array is
  torch_wrapper,   // stands for other tensors, or for other values than its memory has
  uninitialized,   // a lazy module's parameter
  traced,          // in a JAX transformation
};

struct TypeKind {
  Importer importer = Importer::none;
  const DLPackExchangeAPI* api = nullptr;  // of frameworks with the exchange API
};

// Needs the GIL.
TypeKind kind_of(nb::handle value);

// The first line of an error's text. torch's may continue with C++ frames.
std::string first_line(const nb::python_error& error);

}  // namespace moolink::bind
