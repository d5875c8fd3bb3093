#pragma once

#include <nanobind/nanobind.h>

namespace moolink::bind {

namespace nb = nanobind;

inline constexpr const char* kExitSignature =
    "def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, "
    "traceback: types.TracebackType | None, /) -> None";

// Makes objects of the class context managers that close themselves.
template <class Class>
void def_context_manager(Class& bound) {
  bound
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> typing.Self"))
      .def(
          "__exit__", [](typename Class::Type& self, const nb::args&) { self.close(); },
          nb::sig(kExitSignature));
}

}  // namespace moolink::bind
