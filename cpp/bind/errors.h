#pragma once

// C++ errors as the classes of moolink/errors.py.

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"

namespace moolink::bind {

namespace nb = nanobind;

// A str of what may come from a peer: what is not UTF-8 is shown, not raised.
nb::object text(std::string_view utf8);

// The name of the class: of moolink/errors.py, or ValueError.
const char* class_name(ErrorCode code);

// The exception object; needs the GIL.
nb::object to_exception(const Error& error);

// The same, with who waited for whom if that is known.
nb::object to_exception(const Error& error, const std::shared_ptr<const std::string>& detail);

// Lets every moolink::Exception that reaches Python become such an object.
void bind_errors(nb::module_& m);

}  // namespace moolink::bind
