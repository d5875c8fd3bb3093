#pragma once

// How a tensor is imported, by its type.

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

#include <string>

namespace moolink::bind {

namespace nb = nanobind;

// The type of a value, for errors: "module.Class".
std::string type_text(nb::handle value);

// A module that is imported already, else empty; an import here would be unexpected.
nb::object loaded_module(const char* name);

// DLPack's functions for a type of tensors; null: it has none, or others than moolink knows.
const DLPackExchangeAPI* exchange_api(nb::handle type);

// How objects of a type are imported; determined once per type.
enum class Importer { none, numpy, torch, jax, cupy, traced, dlpack, subclass };

struct TypeKind {
  Importer importer = Importer::none;
  const DLPackExchangeAPI* api = nullptr;  // of frameworks with the exchange API
};

// Needs the GIL.
TypeKind kind_of(nb::handle value);

}  // namespace moolink::bind
