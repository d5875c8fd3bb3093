#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

namespace nb = nanobind;

// A class with its public name: moolink.NAME.
template <class Type, class... Extra>
nb::class_<Type> public_class(nb::module_& m, const char* name, const Extra&... extra) {
  const nb::object own = m.attr("__name__");
  m.attr("__name__") = "moolink";
  nb::class_<Type> bound(m, name, extra...);
  m.attr("__name__") = own;
  return bound;
}

}  // namespace moolink::bind
