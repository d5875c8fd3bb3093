#include "bind/errors.h"

#include <cerrno>
#include <exception>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "base/enum_names.h"
#include "bind/bindings.h"

namespace moolink::bind {
namespace {

constexpr auto kRanNames = enum_names<Ran::yes>("no", "maybe", "yes");

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Exception& e) {
    set_raised(to_exception(e.error()));
  } catch (const std::system_error& e) {
    // Other categories have their own numbers. EAGAIN would become a BlockingIOError, which
    // suggests a retry, although there can be no more threads.
    if (e.code().category() != std::generic_category() || e.code().value() == EAGAIN) throw;
    set_raised(nb::handle(PyExc_OSError)(e.code().value(), text(e.what())));
  }
}

}  // namespace

const char* class_name(ErrorCode code) {
  static constexpr const char* kNames[] = {
      "Error",          "Error",       "TimeoutError", "CancelledError", "PeerLost",
      "NoSuchFunction", "RemoteError", "GroupChanged", "QueueFull",      "AuthError",
      "WireError",      "Closed",      "ValueError"};
  static_assert(std::size(kNames) == kErrorCodes);
  return kNames[static_cast<std::size_t>(code) < kErrorCodes ? static_cast<std::size_t>(code) : 0];
}

nb::object text(std::string_view utf8) {
  return own(PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "replace"));
}

nb::object text_or_none(std::string_view utf8) {
  return utf8.empty() ? nb::object(nb::none()) : text(utf8);
}

std::string text_of(nb::handle value) {
  const nb::object text = nb::steal(PyObject_Str(value.ptr()));
  const nb::object utf8 =
      text.is_valid()
          ? nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"))
          : nb::object();
  PyErr_Clear();
  if (!utf8.is_valid()) return "<no text>";
  return {PyBytes_AsString(utf8.ptr()), static_cast<std::size_t>(PyBytes_Size(utf8.ptr()))};
}

std::string type_text(nb::handle value) {
  const nb::handle type = value.type();
  return text_of(type.attr("__module__")) + "." + text_of(type.attr("__qualname__"));
}

Error remote_failure(const std::string& function, std::string message, std::string type) {
  return {.code = ErrorCode::remote,
          .message = std::move(message),
          .function = function,
          .remote_type = std::move(type),
          .ran = Ran::yes};
}

nb::object to_exception(const Error& error, const std::shared_ptr<const std::string>& detail) {
  if (error.code == ErrorCode::invalid_argument) {
    return nb::handle(PyExc_ValueError)(text(error.message));
  }
  const nb::object type = nb::module_::import_("moolink.errors").attr(class_name(error.code));
  nb::dict details;
  details["peer"] = text_or_none(error.peer);
  details["function"] = text_or_none(error.function);
  details["ran"] = kRanNames[error.ran];
  if (error.code == ErrorCode::remote) {
    details["remote_type"] = text(error.remote_type);
    details["remote_traceback"] = text(error.traceback);
  }
  nb::object exception = type(text(error.message), **details);
  if (detail) exception.attr("detail") = text(*detail);
  return exception;
}

nb::object copied(nb::handle exception) {
  return nb::module_::import_("moolink.internal.exceptions").attr("copied")(exception);
}

void set_raised(nb::handle exception) { PyErr_SetObject(exception.type().ptr(), exception.ptr()); }

// Every moolink::Exception that reaches Python becomes such an object.
void bind_errors(nb::module_&) { nb::register_exception_translator(translate, nullptr); }

}  // namespace moolink::bind
