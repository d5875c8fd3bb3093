#include "bind/user_code.h"

#include <unistd.h>

#include <cstdlib>

#include "runtime/engine/workers.h"

namespace moolink::bind {
namespace {

nb::object raised_error() {
  if (PyErr_Occurred() == nullptr) return nb::none();
  const nb::python_error raised;
  return nb::borrow(raised.value());
}

}  // namespace

void end_if_forked() {
  if (!runtime::Workers::in_forked_child()) return;
  try {
    const nb::object raised = raised_error();
    nb::module_::import_("moolink.internal.forks").attr("end_child")(raised);
  } catch (nb::python_error& e) {
    e.restore();
    PyErr_PrintEx(0);
  }
  _exit(EXIT_FAILURE);
}

nb::object call_python(nb::handle function, nb::handle arguments, nb::handle keywords) {
  nb::object result =
      run_user_code([&] { return PyObject_Call(function.ptr(), arguments.ptr(), keywords.ptr()); });
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

void call_back(const nb::object& function, PyObject* argument) {
  const nb::object result = run_user_code(
      [&] { return PyObject_CallFunctionObjArgs(function.ptr(), argument, nullptr); });
  if (!result.is_valid()) PyErr_WriteUnraisable(function.ptr());
}

}  // namespace moolink::bind
