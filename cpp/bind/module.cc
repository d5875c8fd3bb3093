#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bind/bindings.h"

NB_MODULE(_core_of_any_interpreter, m) {
  m.doc() = "The compiled core. moolink re-exports the public names.";
  // Daemon threads and calls in flight hold objects when the interpreter ends: not the user's
  // fault, so no warnings on the terminal.
  nanobind::set_leak_warnings(std::getenv("MOOLINK_LEAK_WARNINGS") != nullptr);
  moolink::bind::bind_errors(m);
  moolink::bind::bind_values(m);
  moolink::bind::bind_device(m);
  moolink::bind::bind_collector(m);
  moolink::bind::bind_context(m);
  moolink::bind::bind_lending(m);
  moolink::bind::bind_future(m);
  moolink::bind::bind_stream(m);
  moolink::bind::bind_completions(m);
  moolink::bind::bind_deferred(m);
  moolink::bind::bind_rpc(m);
  moolink::bind::bind_broker(m);
  moolink::bind::bind_group(m);
  moolink::bind::bind_tensor_layouts(m);
  moolink::bind::bind_shared_words(m);
  moolink::bind::bind_environment_rows(m);
  moolink::bind::bind_pool_batch(m);
  moolink::bind::bind_batch_rows(m);
  moolink::bind::bind_accumulator(m);
  moolink::bind::bind_replay(m);
  moolink::bind::bind_xla(m);
}

// The threads, the context and nanobind's table of types belong to the process: a second
// interpreter would take them from the first one, so it is refused before nanobind begins.
// NOLINTNEXTLINE(bugprone-reserved-identifier): the name that Python looks for
extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    PyErr_SetString(PyExc_ImportError,
                    "moolink works in the main interpreter only, not in a subinterpreter: use it "
                    "there, or in a process of its own (multiprocessing, subprocess)");
    return nullptr;
  }
  return PyInit__core_of_any_interpreter();
}
