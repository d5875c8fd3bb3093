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

template <class Type>
int traverse_object(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Type>(self)->traverse(visit, arg) : 0;
}

template <class Type>
int clear_object(PyObject* self) {
  nb::inst_ptr<Type>(self)->clear();
  return 0;
}

// The slots of a class whose references the garbage collector follows, and drops: its members
// traverse() and clear().
template <class Type>
inline PyType_Slot collected_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse_object<Type>)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear_object<Type>)},
    {0, nullptr},
};

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

// Each adds its part to the module.
void bind_errors(nb::module_& m);
void bind_values(nb::module_& m);
void bind_device(nb::module_& m);
void bind_context(nb::module_& m);
void bind_lending(nb::module_& m);
void bind_future(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_completions(nb::module_& m);
void bind_deferred(nb::module_& m);
void bind_rpc(nb::module_& m);
void bind_broker(nb::module_& m);
void bind_group(nb::module_& m);
void bind_tensor_layouts(nb::module_& m);
void bind_shared_words(nb::module_& m);
void bind_environment_rows(nb::module_& m);
void bind_pool_batch(nb::module_& m);
void bind_batch_rows(nb::module_& m);
void bind_accumulator(nb::module_& m);
void bind_replay(nb::module_& m);
void bind_xla(nb::module_& m);

}  // namespace moolink::bind
