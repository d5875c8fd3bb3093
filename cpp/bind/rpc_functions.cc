// The functions that a peer offers.

#include <nanobind/stl/string.h>

#include <type_traits>
#include <utility>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/deferred.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/rpc.h"
#include "bind/stream.h"
#include "bind/user_code.h"

namespace moolink::bind {
namespace {

constexpr const char* kDefineDoc =
    R"(Lets peers call `function` by `name`.

It runs on a worker thread with the caller's arguments; its return value is the reply. An exception
is raised at the caller as moolink.RemoteError, with type, text and traceback. `function` may itself
make blocking calls.

Raises:
    ValueError: the name is already defined.)";

constexpr const char* kDeferredDoc =
    R"(Like define, but `function` gets an RpcDeferredReturn as its first argument, to reply
later and from any thread: `deferred(value)` or `deferred.error(exception)`. If it is dropped without
a reply, the call fails at once.)";

using Options = std::shared_ptr<const ValueOptions>;
// Runs a Python function for a call, and throws its exceptions.
using Run = void (*)(const nb::object& function, const runtime::Incoming& call,
                     const Options& options);

// Runs a handler. Exceptions of Python and of moolink go to the caller; RpcPeer::run() handles
// others.
template <class Run>
void serve(const runtime::Incoming& call, Run&& run) {
  try {
    run();
  } catch (nb::python_error& e) {
    send_raised(*call.responder, e);
  } catch (const nb::builtin_exception& e) {
    call.responder->send(remote_failure(call.responder->function(), e.what(), "TypeError"));
  } catch (const Exception& e) {
    call.responder->send(e.error());
  }
}

nb::object function_named(const std::weak_ptr<PyRpc::Functions>& functions,
                          const std::string& name) {
  if (const auto table = functions.lock()) {
    const auto found = table->find(name);
    if (found != table->end()) return found->second.borrow();
  }
  throw Exception(Error{.code = ErrorCode::no_such_function,
                        .message = "the function '" + name + "' is gone",
                        .function = name});
}

bool is_generator(nb::handle value) {
  return value.type().is(nb::module_::import_("types").attr("GeneratorType"));
}

void reply_with(const std::shared_ptr<runtime::Responder>& responder, nb::object result,
                const Options& options) {
  const bool yields = PyIter_Check(result.ptr()) != 0;
  if (responder->streamed() && yields) {
    send_stream(responder, std::move(result), options);
  } else if (responder->streamed() || (yields && is_generator(result))) {
    throw nb::type_error(responder->streamed()
                             ? "the handler returns no iterator: call it with async_ or sync"
                             : "the handler is a generator: call it with stream");
  } else {
    send_value(*responder, result, *options);
  }
}

void run_plain(const nb::object& function, const runtime::Incoming& call, const Options& options) {
  const auto [arguments, keywords] = decode_call(call.arguments, *options);
  reply_with(call.responder, call_python(function, arguments, keywords), options);
}

// For a function that replies itself: its first argument is the reply path.
template <class Return>
void run_replying(const nb::object& function, const runtime::Incoming& call,
                  const Options& options) {
  constexpr bool kStreams = std::is_same_v<Return, PyStreamReturn>;
  if (call.responder->streamed() != kStreams) {
    throw nb::type_error(kStreams ? "the handler is a generator: call it with stream"
                                  : "the function replies once: call it with async_ or sync");
  }
  const auto [arguments, keywords] = decode_call(call.arguments, *options);
  const nb::object reply = new_object<Return>(call.responder, options);
  const nb::object all = nb::steal(PySequence_Concat(nb::make_tuple(reply).ptr(), arguments.ptr()));
  call_python(function, all, keywords);
}

void add_function(const PyRpc& self, const std::string& name, nb::callable function, Run run,
                  const std::string& group) {
  {
    const GilRelease unlocked;
    auto handler = [functions = std::weak_ptr(self.functions()), name,
                    options = self.shared_options(), run](const runtime::Incoming& call) {
      serve(call, [&] { run(function_named(functions, name), call, options); });
    };
    self.peer()->define(name, std::move(handler), group);
  }
  (*self.functions())[name] = Reference(std::move(function));
}

template <Run run>
void define(const PyRpc& self, const std::string& name, nb::callable function) {
  add_function(self, name, std::move(function), run, {});
}

void define_confined(const PyRpc& self, const std::string& name, nb::callable function,
                     const std::string& group) {
  add_function(self, name, std::move(function), run_replying<PyDeferred>, group);
}

void undefine(const PyRpc& self, const std::string& name) {
  const auto interrupt = signal_check();
  // Extracted first: while this waits for running calls, another thread may define the name again.
  auto function = self.functions()->extract(name);
  if (!without_gil([&] { return self.peer()->undefine(name, interrupt); })) {
    throw Exception(ErrorCode::invalid_argument, "function '" + name + "' is not defined");
  }
  function = {};
  release_dropped();
}

}  // namespace

void bind_functions(nb::class_<PyRpc>& rpc) {
  rpc.def("define", &define<run_plain>, nb::arg("name"), nb::arg("function"), kDefineDoc,
          nb::sig("def define(self, name: str, function: typing.Callable[..., typing.Any]) -> "
                  "None"))
      .def("_define_streamed", &define<run_replying<PyStreamReturn>>, nb::arg("name"),
           nb::arg("function"),
           "Like define_deferred, for calls by stream: the first argument is an RpcStreamReturn.",
           nb::sig("def _define_streamed(self, name: str, function: typing.Callable[..., "
                   "typing.Any]) -> None"))
      .def("define_deferred", &define<run_replying<PyDeferred>>, nb::arg("name"),
           nb::arg("function"), kDeferredDoc,
           nb::sig("def define_deferred(self, name: str, function: typing.Callable[..., "
                   "typing.Any]) -> None"))
      .def("_define_confined", &define_confined, nb::arg("name"), nb::arg("function"),
           nb::arg("group"),
           "Like define_deferred; peers that hold another group's key cannot call it.",
           nb::sig("def _define_confined(self, name: str, function: typing.Callable[..., "
                   "typing.Any], group: str) -> None"))
      .def("undefine", &undefine, nb::arg("name"),
           "Withdraws a function and waits until no call of it runs; a stream that has begun goes "
           "on. Raises ValueError if it is not defined.");
}

}  // namespace moolink::bind
