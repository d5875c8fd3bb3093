#pragma once

// C++ errors as the classes of moolink/errors.py.

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"

namespace moolink::bind {

namespace nb = nanobind;

[[noreturn]] inline void type_error(const std::string& text) { throw nb::type_error(text.c_str()); }
[[noreturn]] inline void value_error(const std::string& text) {
  throw nb::value_error(text.c_str());
}

// Takes over a new reference. Throws Python's error if it is null.
inline nb::object own(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}
inline nb::object interned(const char* text) { return own(PyUnicode_InternFromString(text)); }

// The value that EnumNames gives this name. Throws Exception{invalid_argument} if there is none;
// its text has the name between `before` and `after`.
template <class Names>
auto value_named(const Names& names, std::string_view name, const char* before,
                 const char* after = "") {
  if (const auto value = names.find(name)) return *value;
  throw Exception(ErrorCode::invalid_argument, std::string(before).append(name).append(after));
}

// A str of text that a peer may have sent: replaces bytes that are not UTF-8 instead of raising.
nb::object text(std::string_view utf8);
nb::object text_or_none(std::string_view utf8);  // None: the text is empty
// str() of any object, without characters that UTF-8 lacks; "<no text>" if it raises.
std::string text_of(nb::handle value);
// The name of a value's type: "module.Class".
std::string type_text(nb::handle value);

// The name of the class: of moolink/errors.py, or ValueError.
const char* class_name(ErrorCode code);

// A call that ran and failed: RemoteError at the caller.
Error remote_failure(const std::string& function, std::string message, std::string type);

// The exception object, with the waits at the time-out if they are known; needs the GIL.
nb::object to_exception(const Error& error,
                        const std::shared_ptr<const std::string>& detail = nullptr);

// A copy without tracebacks of an exception that is kept to be raised again; see
// moolink/internal/exceptions.py.
nb::object copied(nb::handle exception);

// Makes it the thread's error, as `raise` does; the caller throws or returns that there is one.
void set_raised(nb::handle exception);

}  // namespace moolink::bind
