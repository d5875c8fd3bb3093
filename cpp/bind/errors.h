#pragma once

// C++ errors as the classes of moolink/errors.py.

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"

namespace moolink::bind {

namespace nb = nanobind;

// A str of text that a peer may have sent: replaces bytes that are not UTF-8 instead of raising.
nb::object text(std::string_view utf8);

// The name of the class: of moolink/errors.py, or ValueError.
const char* class_name(ErrorCode code);

// The exception object, with the waits at the time-out if they are known; needs the GIL.
nb::object to_exception(const Error& error,
                        const std::shared_ptr<const std::string>& detail = nullptr);

// Makes it the thread's error, as `raise` does; the caller throws or returns that there is one.
void set_raised(nb::handle exception);

}  // namespace moolink::bind
