#include "bind/future.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdio>
#include <utility>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/user_code.h"

namespace moolink::bind {
namespace {

[[noreturn]] void raise(const nb::object& exception) {
  set_raised(exception);
  throw nb::python_error();
}

void add_done_callback(nb::handle self, nb::callable callback) {
  const auto& future = nb::cast<PyFuture&>(self).future();
  await_engine(future->context());
  future->then([function = Reference(std::move(callback)), self = Reference(nb::borrow(self))] {
    call_back(function.borrow(), self.get());
  });
}

nb::object await(nb::handle self) {
  return nb::module_::import_("moolink.rpc.asyncio_bridge").attr("wait_for")(self);
}

}  // namespace

std::string Subject::text() const {
  std::string text = std::string(what) + " '" + name + "'";
  if (!peer.empty()) text += " at peer '" + peer + "'";
  return text;
}

bool PyFuture::wait(std::optional<double> timeout) {
  park_if_exiting();
  if (future_->done()) return true;
  const bool over = wait_unlocked(timeout, [this](Time deadline, const auto& interrupt) {
    return future_->wait(deadline, interrupt);
  });
  release_dropped();  // such as the operation's inputs
  return over;
}

nb::any PyFuture::result(std::optional<double> timeout) {
  if (!wait(timeout)) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", *timeout);
    const nb::object exception = to_exception(
        make_error(ErrorCode::timeout, "the " + subject_.text() + " was not done within " +
                                           seconds + " s of waiting for it; it goes on"));
    exception.attr("detail") = text(future_->who_waits());
    raise(exception);
  }
  return nb::borrow<nb::any>(value());
}

nb::object PyFuture::value() {
  decode();
  if (exception_.is_valid()) raise(exception_);
  return value_;
}

nb::object PyFuture::exception() {
  if (!future_->done()) return nb::none();
  decode();
  return exception_.is_valid() ? exception_ : nb::none();
}

void PyFuture::decode() {
  if (decoded_) return;
  const bool in_child = future_->of_parent();
  std::unique_lock lock(decoding_, std::try_to_lock);
  if (!lock) {
    if (in_child && !decoding_in_child_) {
      throw Exception(ErrorCode::closed, "this process was forked while another thread read the " +
                                             subject_.text() + ": read it before the fork");
    }
    const GilRelease unlocked;
    lock.lock();
  }
  decoding_in_child_ = in_child;
  if (!decoded_) decode_once();
  decoded_ = true;
}

void PyFuture::decode_once() {
  if (const Error* error = std::get_if<Error>(&future_->outcome())) {
    exception_ = to_exception(*error, future_->detail());
    return;
  }
  try {
    value_ = (*decode_)(std::get<wire::Payload>(future_->outcome()));
  } catch (const Exception& e) {
    exception_ = to_exception(e.error());
  } catch (nb::python_error& e) {
    exception_ = nb::borrow(e.value());
  } catch (const std::exception& e) {
    exception_ = nb::handle(PyExc_RuntimeError)(e.what());
  }
}

std::string PyFuture::repr() const {
  const char* state = "pending";
  if (future_->done()) {
    const Error* error = std::get_if<Error>(&future_->outcome());
    state = error == nullptr ? "done" : class_name(error->code);
  }
  return "<moolink.Future of " + subject_.text() + ", " + state + ">";
}

bool PyFuture::cancel() {
  if (future_->done()) return false;
  await_engine(future_->context());
  future_->cancel();
  return true;
}

nb::object PyFuture::released() {
  if (released_ == nullptr) {
    const auto context = default_context();
    released_ = std::make_shared<runtime::Future>(context);
    await_engine(*context);
    const runtime::Engine::Lock lock = context->lock();
    released_->complete(wire::Payload{});
  }
  return new_object<PyFuture>(
      released_, [](const wire::Payload&) { return nb::none(); },
      Subject{"release of the arrays lent to the call of", subject_.name, subject_.peer});
}

int PyFuture::traverse(visitproc visit, void* arg) const {
  Py_VISIT(value_.ptr());
  Py_VISIT(exception_.ptr());
  return 0;
}

void PyFuture::clear() {
  value_.reset();
  exception_.reset();
}

void bind_future(nb::module_& m) {
  auto future =
      public_class<PyFuture>(m, "Future", nb::type_slots(collected_slots<PyFuture>),
                             "The outcome of a call or operation. It may be read any number of "
                             "times, from any thread, and "
                             "awaited by many tasks on any event loops.");
  future
      .def("result", &PyFuture::result, nb::arg("timeout") = nb::none(),
           "Waits for the result and returns it, or raises the error.\n\nArgs:\n    timeout: "
           "seconds to wait; None waits until the operation itself ends.\n\nRaises:\n    "
           "moolink.TimeoutError: there is no result in time (the operation goes on), or the "
           "operation's own time limit has passed.\n    moolink.Error: the operation failed; the "
           "subclass tells how.")
      .def("wait", &PyFuture::wait, nb::arg("timeout") = nb::none(),
           "Waits until the operation has ended, with a result or an error; returns whether it "
           "ended within `timeout` seconds.")
      .def("done", &PyFuture::done, "Whether the operation has ended.")
      .def("exception", &PyFuture::exception,
           nb::sig("def exception(self) -> BaseException | None"),
           "Returns the error; None if the operation succeeded or has not ended.")
      .def("cancel", &PyFuture::cancel,
           "Cancels the operation, here and at the peer; result() then raises CancelledError. "
           "Returns False if the operation had already ended.")
      .def("add_done_callback", &add_done_callback, nb::arg("callback"),
           nb::sig("def add_done_callback(self, callback: typing.Callable[[Future], object]) -> "
                   "None"),
           "Calls `callback(future)` on a worker thread once the operation has ended.")
      .def_prop_ro("released", &PyFuture::released, nb::sig("def released(self) -> Future"),
                   "A Future that is done once no peer reads the lent memory any more, so that it "
                   "may be written again (see moolink.lend). If nothing was lent, it is done at "
                   "once. Its result is None.")
      .def("__repr__", &PyFuture::repr)
      .def("__await__", &await,
           nb::sig("def __await__(self) -> typing.Generator[typing.Any, None, typing.Any]"))
      .def("__iter__", &await,
           nb::sig("def __iter__(self) -> typing.Generator[typing.Any, None, typing.Any]"));
}

}  // namespace moolink::bind
