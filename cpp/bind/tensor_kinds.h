#pragma once

// Which of its ways into moolink a tensor takes, by its type.

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>

namespace moolink::bind {

namespace nb = nanobind;

// A module that is imported already, else empty; importing one would surprise.
nb::object loaded_module(const char* name);

// How objects of a type are imported; found once a type.
enum class Importer { none, numpy, torch, jax, cupy, traced, dlpack, subclass };

struct TypeKind {
  Importer importer = Importer::none;
  const DLPackExchangeAPI* api = nullptr;  // of frameworks that have it
};

// Needs the GIL.
TypeKind kind_of(nb::handle value);

}  // namespace moolink::bind
