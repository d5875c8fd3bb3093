#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <utility>

namespace moolink::bind {

namespace nb = nanobind;

// A class with its public name, which is in another module.
template <class Type, class... Extra>
nb::class_<Type> public_class(nb::module_& m, const char* module, const char* name,
                              const Extra&... extra) {
  const nb::object own = m.attr("__name__");
  m.attr("__name__") = module;
  nb::class_<Type> bound(m, name, extra...);
  m.attr("__name__") = own;
  return bound;
}

// A Python object that owns a new Type.
template <class Type, class... Args>
nb::object new_object(Args&&... args) {
  return nb::cast(new Type(std::forward<Args>(args)...), nb::rv_policy::take_ownership);
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

// A method of self.peer(), as a function of self.
template <class Self, class Peer, class Result, class... Args>
auto forward(Result (Peer::*method)(Args...)) {
  return [method](const Self& self, Args... args) {
    return std::invoke(method, self.peer(), args...);
  };
}
template <class Self, class Peer, class Result>
auto forward(Result (Peer::*method)() const) {
  return [method](const Self& self) { return std::invoke(method, self.peer()); };
}

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
          "__exit__", [](nb::handle self, const nb::args&) { self.attr("close")(); },
          nb::sig(kExitSignature));
}

// Each adds its part to the module.
void bind_errors(nb::module_& m);
void bind_values(nb::module_& m);
void bind_device(nb::module_& m);
void bind_collector(nb::module_& m);
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
// Must be the last call: it changes the functions that are bound by then.
void bind_arguments(nb::module_& m);

}  // namespace moolink::bind
