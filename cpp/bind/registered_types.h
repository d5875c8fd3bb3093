#pragma once

// The types beyond Python's own that values may have: registered on both sides by name
// (moolink.register), never looked up or imported because of a peer's message.

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

// Null when the type is not registered. The result lives as long as the process. All of it needs
// the GIL.
const RegisteredType* find_registered(PyTypeObject* type);
// The same, after registering the types of the standard library and of imported frameworks, which
// happens when the first unknown type is met.
const RegisteredType* find_registered_late(PyTypeObject* type);
const RegisteredType* find_registered_late(std::string_view name);

void bind_registered_types(nb::module_& m);

}  // namespace moolink::bind
