#pragma once

// Calls to the user's code on threads of the library: handlers, callbacks, generators.

#include <nanobind/nanobind.h>

#include <utility>

#include "bind/gil.h"

namespace moolink::bind {

namespace nb = nanobind;

// Ends this process, with the present error as its outcome, if a task of this worker has forked and
// this is the child that returns from it: its reply and all further work are the parent's.
void end_if_forked();

// `call` returns a new reference, or null with an error set; so does this.
template <class Call>
nb::object run_user_code(Call&& call) {
  nb::object result = nb::steal(survive_exit(std::forward<Call>(call)));
  end_if_forked();
  return result;
}

// The same for a function and its arguments; throws the error.
nb::object call_python(nb::handle function, nb::handle arguments, nb::handle keywords);

// Calls a callback on a worker, with an argument if there is one; the interpreter's hook gets its
// exceptions.
void call_back(const nb::object& function, PyObject* argument = nullptr);

}  // namespace moolink::bind
