#include "bind/deferred.h"

#include <nanobind/stl/string.h>

#include <utility>

#include "bind/context.h"
#include "bind/gil.h"
#include "bind/reference.h"

namespace moolink::bind {
namespace {

std::string text_of(nb::handle value) {
  const nb::object text = nb::steal(PyObject_Str(value.ptr()));
  if (!text.is_valid()) {
    PyErr_Clear();  // the exception's own __str__ raised
    return "<no text>";
  }
  return nb::cast<std::string>(text.attr("encode")("utf-8", "replace").attr("decode")("utf-8"));
}

std::string qualified_name(nb::handle value) {
  const nb::handle type = value.type();
  const std::string module = text_of(type.attr("__module__"));
  const std::string name = text_of(type.attr("__qualname__"));
  return module == "builtins" ? name : module + "." + name;
}

Error remote_error(nb::handle exception, const std::string& function) {
  const nb::object lines = nb::module_::import_("traceback").attr("format_exception")(exception);
  const std::string type = qualified_name(exception);
  return {ErrorCode::remote,
          "the handler of '" + function + "' raised " + type + ": " + text_of(exception),
          {},
          function,
          type,
          text_of(nb::str("").attr("join")(lines)),
          Ran::yes};
}

// On a worker; what it raises has nobody to go to but the interpreter's hook.
void call_back(const Reference& callback) {
  const nb::object function = callback.borrow();
  const nb::object result =
      nb::steal(survive_exit([&] { return PyObject_CallNoArgs(function.ptr()); }));
  if (!result.is_valid()) PyErr_WriteUnraisable(function.ptr());
}

}  // namespace

Error to_remote_error(nb::python_error& raised, const std::string& function) {
  try {
    return remote_error(raised.value(), function);
  } catch (nb::python_error& again) {
    again.discard_as_unraisable("the traceback of a handler");
    return {ErrorCode::remote,
            "the handler of '" + function + "' raised",
            {},
            function,
            qualified_name(raised.value()),
            {},
            Ran::yes};
  }
}

Error unsendable(const runtime::Responder& responder, const std::string& what,
                 const std::string& why) {
  return {ErrorCode::remote,
          what + " of '" + responder.function() + "' cannot travel: " + why,
          {},
          responder.function(),
          "ValueError",
          {},
          Ran::yes};
}

void send_value(runtime::Responder& responder, nb::handle value, const ValueOptions& options) {
  rpc::Reply reply;
  try {
    Lender lender{default_context(), nullptr, responder.place()};
    reply = encode_value(value, options, lender.context->pool(), &lender);
  } catch (nb::python_error& e) {
    reply = to_remote_error(e, responder.function());
  } catch (const std::exception& e) {  // the codec's: too deep, too large
    reply = unsendable(responder, "the result", e.what());
  }
  responder.send(std::move(reply));
}

void PyDeferred::require_unsent() const {
  if (responder_->sent()) {
    throw Exception(ErrorCode::error,
                    "the call of '" + responder_->function() + "' was replied to already");
  }
}

void PyDeferred::reply(nb::object value) {
  require_unsent();
  send_value(*responder_, value, *options_);
}

void PyDeferred::error(nb::handle exception) {
  require_unsent();
  if (!PyExceptionInstance_Check(exception.ptr())) {
    throw nb::type_error("error() takes an exception instance");
  }
  responder_->send(remote_error(exception, responder_->function()));
}

void PyDeferred::refuse(const std::string& reason) {
  require_unsent();
  responder_->send(
      Error{ErrorCode::queue_full, reason, {}, responder_->function(), {}, {}, Ran::no});
}

void PyDeferred::add_cancel_callback(nb::callable callback) {
  responder_->on_cancel([callback = Reference(std::move(callback))] { call_back(callback); });
}

bool PyStreamReturn::item(nb::object value) {
  require_unsent();
  responder_->send_item(encode_value(value, *options_, default_context()->pool()));
  return responder_->has_room();
}

void PyStreamReturn::when_room(nb::callable callback) {
  responder_->when_room([callback = Reference(std::move(callback))] { call_back(callback); });
}

void bind_deferred(nb::module_& m) {
  nb::class_<PyDeferred>(m, "RpcDeferredReturn",
                         "The reply of a define_deferred handler: call it once, from any thread.")
      .def("__call__", &PyDeferred::reply, nb::arg("value") = nb::none(),
           "Sends the result. Raises moolink.Error if there was a reply already.")
      .def("error", &PyDeferred::error, nb::arg("exception"),
           "Makes the call fail with RemoteError at the caller.")
      .def("refuse", &PyDeferred::refuse, nb::arg("reason"),
           "Makes the call fail with QueueFull at the caller: it was not begun.")
      .def("add_cancel_callback", &PyDeferred::add_cancel_callback, nb::arg("callback"),
           "Calls `callback()` on a worker thread as soon as the caller has stopped waiting: it "
           "cancelled the call, its time limit passed, it was lost, or this peer was closed. Never "
           "once there was a reply.")
      .def("cancelled", &PyDeferred::cancelled,
           "Whether the caller has stopped waiting, so that no reply is needed.");
  nb::class_<PyStreamReturn, PyDeferred>(m, "RpcStreamReturn",
                                         "The items and then the reply of a streamed call.")
      .def("item", &PyStreamReturn::item, nb::arg("value"),
           "Sends an item; returns whether the caller takes another one now. Raises moolink.Error "
           "if it did not.")
      .def("when_room", &PyStreamReturn::when_room, nb::arg("callback"),
           "Calls `callback()` on a worker thread once the caller takes another item, or has "
           "stopped waiting.");
}

}  // namespace moolink::bind
