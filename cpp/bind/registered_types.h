#pragma once

// The types beyond Python's own that values may have: registered on both sides by name
// (moolink.register), never looked up or imported because of what a peer sent.

#include <nanobind/nanobind.h>

#include <string_view>
#include <vector>

#include "wire/value.h"

namespace moolink::bind {

namespace nb = nanobind;

enum class TypeForm { dataclass, namedtuple, enumeration, flags, converted };

struct RegisteredType {
  wire::TypeHead head;
  TypeForm form = TypeForm::dataclass;
  nb::object type;
  std::vector<nb::object> field_names;  // interned, in the order of head.fields
  nb::object to_state;                  // converted: value -> state
  nb::object from_state;                // converted: state -> value
};

// Null when the type is not registered. What is returned lives as long as the process. All of it
// needs the GIL.
const RegisteredType* find_registered(PyTypeObject* type);
// The same, after the types of the standard library and of imported frameworks had their chance:
// they are registered when one is first met.
const RegisteredType* find_registered_late(PyTypeObject* type);
const RegisteredType* find_registered_late(std::string_view name);

void bind_registered_types(nb::module_& m);

}  // namespace moolink::bind
