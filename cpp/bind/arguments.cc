// Errors for arguments of a wrong number or type name the wrong argument.
//
// nanobind's errors list the signature and the given types, and it has no hook for another text. So
// each of the module's functions gets an entry of ours, which calls nanobind's: one more call.

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "bind/bindings.h"
#include "bind/errors.h"

namespace moolink::bind {
namespace {

using Entry = PyObject* (*)(PyObject*, PyObject* const*, std::size_t, PyObject*);

// The beginning of nanobind's objects for functions; replace_entry() checks this.
struct Function {
  PyObject_VAR_HEAD Entry entry;
};

constexpr std::size_t kEntries = 8;  // nanobind 3.1 has six, by the kinds of arguments
std::array<Entry, kEntries> of_nanobind{};

bool is_about_arguments(nb::handle function) {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) return false;
  nb::python_error raised;
  const std::string begin = text_of(function.attr("__name__")) + "(): incompatible function arg";
  const bool found = text_of(raised.value()).starts_with(begin);
  if (!found) raised.restore();
  return found;
}

// A call has failed: replaces nanobind's text about the arguments, and leaves every other error.
void explain(nb::handle function, PyObject* const* arguments, std::size_t positional,
             nb::handle names) {
  try {
    if (!is_about_arguments(function)) return;
    nb::list given;
    for (std::size_t i = 0; i < positional; ++i) given.append(nb::handle(arguments[i]));
    nb::dict named;
    const std::size_t count = names.is_valid() ? nb::len(names) : 0;
    for (std::size_t i = 0; i < count; ++i) named[names[i]] = nb::handle(arguments[positional + i]);
    set_raised(
        nb::module_::import_("moolink.internal.arguments").attr("refusal")(function, given, named));
  } catch (nb::python_error& e) {
    e.restore();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  }
}

template <std::size_t Number>
PyObject* called(PyObject* self, PyObject* const* arguments, std::size_t count, PyObject* names) {
  PyObject* const result = of_nanobind[Number](self, arguments, count, names);
  if (result == nullptr) {
    explain(self, arguments, static_cast<std::uint32_t>(count), names);  // higher bits: flags
  }
  return result;
}

template <std::size_t... Numbers>
constexpr std::array<Entry, kEntries> all_called(std::index_sequence<Numbers...>) {
  return {&called<Numbers>...};
}

void replace_entry(nb::handle function) {
  constexpr auto kCalled = all_called(std::make_index_sequence<kEntries>());
  auto* const object = reinterpret_cast<Function*>(function.ptr());
  const auto address = nb::cast<std::size_t>(function.attr("__vectorcalloffset__"));
  // Another layout: the functions keep nanobind's text.
  if (reinterpret_cast<std::size_t>(object->entry) != address) return;
  for (std::size_t i = 0; i < kEntries; ++i) {
    if (of_nanobind[i] == nullptr) of_nanobind[i] = object->entry;
    if (of_nanobind[i] != object->entry) continue;
    object->entry = kCalled[i];
    return;
  }
}

void replace_entries(nb::handle names) {
  for (const nb::handle value : nb::steal<nb::list>(PyMapping_Values(names.ptr()))) {
    if (nb::hasattr(value, "__nb_signature__")) replace_entry(value);
  }
}

}  // namespace

void bind_arguments(nb::module_& m) {
  replace_entries(m.attr("__dict__"));
  for (const nb::handle value : nb::steal<nb::list>(PyMapping_Values(m.attr("__dict__").ptr()))) {
    if (PyType_Check(value.ptr())) replace_entries(value.attr("__dict__"));
  }
}

}  // namespace moolink::bind
