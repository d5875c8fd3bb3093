#include "bind/deferred.h"

#include <nanobind/stl/string.h>

#include <string_view>
#include <utility>

#include "bind/bindings.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/user_code.h"

namespace moolink::bind {
namespace {

std::string raised_type(nb::handle exception) {
  const std::string name = type_text(exception);
  constexpr std::string_view kBuiltins = "builtins.";
  return name.starts_with(kBuiltins) ? name.substr(kBuiltins.size()) : name;
}

Error remote_error(nb::handle exception, const std::string& function) {
  const nb::object lines = nb::module_::import_("traceback").attr("format_exception")(exception);
  const std::string type = raised_type(exception);
  Error error = remote_failure(
      function, "the handler of '" + function + "' raised " + type + ": " + text_of(exception),
      type);
  error.traceback = text_of(nb::str("").attr("join")(lines));
  return error;
}

wire::Payload encode_for(runtime::Responder& responder, nb::handle value,
                         const ValueOptions& options) {
  Lender lender{responder.context(), nullptr, responder.recipient()};
  return encode_value(value, options, lender.context->pool(), &lender);
}

bool send(runtime::Responder& responder, rpc::Reply reply) {
  await_engine(*responder.context());
  return responder.send(std::move(reply));
}

}  // namespace

Error to_remote_error(nb::python_error& raised, const std::string& function) {
  try {
    return remote_error(raised.value(), function);
  } catch (nb::python_error& again) {
    again.discard_as_unraisable("the traceback of a handler");
    return remote_failure(function, "the handler of '" + function + "' raised",
                          raised_type(raised.value()));
  }
}

void send_raised(runtime::Responder& responder, nb::python_error& raised) {
  if (send(responder, to_remote_error(raised, responder.function()))) return;
  try {
    nb::module_::import_("moolink.internal.logs")
        .attr("raised_after_reply")(text(responder.function()), raised.value());
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("moolink's log");
  }
}

Error unsendable(const runtime::Responder& responder, const std::string& what,
                 const std::string& why) {
  return remote_failure(responder.function(),
                        what + " of '" + responder.function() + "' cannot travel: " + why,
                        "ValueError");
}

void send_value(runtime::Responder& responder, nb::handle value, const ValueOptions& options) {
  if (PyExceptionInstance_Check(value.ptr())) {
    send(responder, remote_error(value, responder.function()));
    return;
  }
  rpc::Reply reply;
  try {
    reply = encode_for(responder, value, options);
  } catch (nb::python_error& e) {
    reply = to_remote_error(e, responder.function());
  } catch (const std::exception& e) {  // the codec's: too deep, too large
    reply = unsendable(responder, "the result", e.what());
  }
  send(responder, std::move(reply));
}

void send_item(runtime::Responder& responder, nb::handle value, const ValueOptions& options) {
  wire::Payload item = encode_for(responder, value, options);
  await_engine(*responder.context());
  responder.send_item(std::move(item));
}

void PyDeferred::require_unsent() const {
  if (responder_->sent()) {
    throw Exception(ErrorCode::error,
                    "the call of '" + responder_->function() + "' was replied to already");
  }
}

std::string PyDeferred::repr() const {
  const char* state = responder_->sent() ? "replied" : cancelled() ? "cancelled" : "pending";
  return "<moolink.rpc.RpcDeferredReturn of '" + responder_->function() + "', " + state + ">";
}

void PyDeferred::reply(nb::object value) {
  require_unsent();
  send_value(*responder_, value, *options_);
  cancel_callbacks_.reset();
}

void PyDeferred::finish(rpc::Reply reply) {
  require_unsent();
  send(*responder_, std::move(reply));
  cancel_callbacks_.reset();
}

void PyDeferred::error(nb::handle exception) {
  if (!PyExceptionInstance_Check(exception.ptr())) {
    throw nb::type_error("error() takes an exception instance");
  }
  finish(remote_error(exception, responder_->function()));
}

void PyDeferred::refuse(const std::string& reason) {
  finish(
      Error{.code = ErrorCode::queue_full, .message = reason, .function = responder_->function()});
}

void PyDeferred::reject(const std::string& reason) {
  const std::string& function = responder_->function();
  Error error = remote_failure(function, "the call of '" + function + "' was refused: " + reason,
                               "ValueError");
  error.ran = Ran::no;
  finish(std::move(error));
}

// The callbacks are members here, for the garbage collector: they often refer to this object.
void PyDeferred::add_cancel_callback(Callback callback) {
  if (responder_->sent()) return;
  if (!cancel_callbacks_) cancel_callbacks_ = std::make_shared<Callbacks>();
  // Also kept here: another thread may reply while this one waits for the engine.
  const std::shared_ptr<Callbacks> callbacks = cancel_callbacks_;
  const std::size_t number = callbacks->size();
  callbacks->push_back(std::move(callback));
  await_engine(*responder_->context());
  responder_->on_cancel([callbacks = std::weak_ptr(callbacks), number] {
    nb::object function;
    if (const auto kept = callbacks.lock()) function = (*kept)[number];
    if (function.is_valid()) call_back(function);
  });
}

int PyDeferred::traverse(visitproc visit, void* arg) const {
  if (!cancel_callbacks_) return 0;
  for (const nb::object& callback : *cancel_callbacks_) Py_VISIT(callback.ptr());
  return 0;
}

bool PyStreamReturn::item(nb::object value) {
  require_unsent();
  send_item(*responder_, value, *options_);
  return responder_->has_room();
}

void PyStreamReturn::when_room(Callback callback) {
  await_engine(*responder_->context());
  responder_->when_room(
      [callback = Reference(std::move(callback))] { call_back(callback.borrow()); });
}

void bind_deferred(nb::module_& m) {
  auto deferred = public_class<PyDeferred>(
      m, "moolink.rpc", "RpcDeferredReturn", nb::type_slots(collected_slots<PyDeferred>),
      "The reply of a define_deferred handler. Call it once, from any thread.");
  deferred
      .def("__call__", &PyDeferred::reply, nb::arg("value") = nb::none(),
           nb::sig("def __call__(self, value: typing.Any = None) -> None"),
           "Sends the result; an exception instance makes the call fail, as error() does. Raises "
           "moolink.Error if a reply was already sent.")
      .def("error", &PyDeferred::error, nb::arg("exception"),
           nb::sig("def error(self, exception: BaseException) -> None"),
           "Makes the call fail with RemoteError at the caller.")
      .def("refuse", &PyDeferred::refuse, nb::arg("reason"),
           "Makes the call fail with QueueFull at the caller: the call has not begun.")
      .def("reject", &PyDeferred::reject, nb::arg("reason"),
           "Makes the call fail with RemoteError (remote_type \"ValueError\", ran \"no\") at the "
           "caller: its request cannot be carried out.")
      .def("add_cancel_callback", &PyDeferred::add_cancel_callback, nb::arg("callback"),
           "Calls `callback()` on a worker thread as soon as the caller has stopped waiting: it "
           "cancelled the call, its time limit passed, it was lost, or this peer was closed. "
           "`callback()` is not called after a reply, nor once nothing refers to this object any "
           "more.")
      .def("cancelled", &PyDeferred::cancelled,
           "Whether the caller has stopped waiting, so that no reply is needed.")
      .def("_caller_group", &PyDeferred::caller_group,
           "The group whose key the caller holds, if this peer holds the token; else \"\".")
      .def("__repr__", &PyDeferred::repr);
  nb::class_<PyStreamReturn, PyDeferred>(m, "RpcStreamReturn",
                                         nb::type_slots(collected_slots<PyDeferred>),
                                         "The reply of a streamed call, with the items before it.")
      .def("item", &PyStreamReturn::item, nb::arg("value"),
           "Sends an item; returns whether the caller takes another one now. Raises ValueError if "
           "the caller takes none now.")
      .def("when_room", &PyStreamReturn::when_room, nb::arg("callback"),
           "Calls `callback()` on a worker thread once the caller takes another item, or has "
           "stopped waiting.");
}

}  // namespace moolink::bind
