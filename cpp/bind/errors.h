#pragma once

// C++ errors as the classes of moolink/errors.py.

#include <nanobind/nanobind.h>

#include "base/error.h"

namespace moolink::bind {

namespace nb = nanobind;

// The exception object; needs the GIL.
nb::object to_exception(const Error& error);

// Lets every moolink::Exception that reaches Python become such an object.
void bind_errors(nb::module_& m);

}  // namespace moolink::bind
