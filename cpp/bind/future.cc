#include "bind/future.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdio>
#include <map>
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

// From each thread that waits for a future's value to be decoded to the thread that decodes it.
// Guarded by the GIL.
std::map<std::thread::id, std::thread::id>& waiting_for_decoders() {
  static auto* const waiting = new std::map<std::thread::id, std::thread::id>;
  return *waiting;
}

class WaitingForDecoder {
 public:
  explicit WaitingForDecoder(std::thread::id decoder) {
    waiting_for_decoders()[std::this_thread::get_id()] = decoder;
  }
  ~WaitingForDecoder() { waiting_for_decoders().erase(std::this_thread::get_id()); }
  WaitingForDecoder(const WaitingForDecoder&) = delete;
  WaitingForDecoder& operator=(const WaitingForDecoder&) = delete;
};

// Whether `decoder` is `thread`, or waits, directly or through others, for a value that `thread`
// decodes.
bool decodes_for(std::thread::id decoder, std::thread::id thread) {
  const auto& waiting = waiting_for_decoders();
  while (decoder != thread) {
    const auto next = waiting.find(decoder);
    if (next == waiting.end()) return false;
    decoder = next->second;
  }
  return true;
}

// This thread decodes; at the end, the threads that wait for it check again.
class DecodingScope {
 public:
  DecodingScope(std::optional<std::thread::id>& decoder, std::shared_ptr<runtime::Future>& ended)
      : decoder_(decoder), ended_(ended) {
    decoder_ = std::this_thread::get_id();
  }
  ~DecodingScope() {
    decoder_.reset();
    const auto ended = std::exchange(ended_, nullptr);
    if (ended == nullptr || ended->of_parent()) return;
    await_engine(ended->context());
    const runtime::Engine::Lock lock = ended->context().lock();
    ended->complete(wire::Payload{});
  }
  DecodingScope(const DecodingScope&) = delete;
  DecodingScope& operator=(const DecodingScope&) = delete;

 private:
  std::optional<std::thread::id>& decoder_;
  std::shared_ptr<runtime::Future>& ended_;
};

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
  const nb::object raised = error();
  if (raised.is_valid()) raise(raised);
  return value_;
}

nb::object PyFuture::exception() {
  if (!future_->done()) return nb::none();
  nb::object made = error();
  return made.is_valid() ? made : nb::none();
}

// A new exception for each reader: the one that a reader raises refers to its frames, and they may
// refer to this. Invalid: there is a value.
nb::object PyFuture::error() {
  if (const Error* error = std::get_if<Error>(&future_->outcome())) {
    return to_exception(*error, future_->detail());
  }
  nb::object raised = decode();
  if (!raised.is_valid() && failure_.is_valid()) raised = copied(failure_);
  return raised;
}

// Returns the exception, with its traceback, if this call decoded the value and failed.
nb::object PyFuture::decode() {
  while (!decoded_) {
    if (!decoder_) return decode_once();
    wait_for_decoder();
  }
  return {};
}

nb::object PyFuture::decode_once() {
  const DecodingScope scope(decoder_, decoding_ended_);
  decoding_in_child_ = future_->of_parent();
  nb::object raised;
  try {
    value_ = (*decode_)(std::get<wire::Payload>(future_->outcome()));
  } catch (const Exception& e) {
    raised = to_exception(e.error());
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_Exception)) throw;  // Ctrl-C, for example, is no outcome of the decoding
    raised = nb::borrow(e.value());
  } catch (const std::exception& e) {
    raised = nb::handle(PyExc_RuntimeError)(e.what());
  }
  if (raised.is_valid()) failure_ = copied(raised);
  decoded_ = true;
  return raised;
}

void PyFuture::wait_for_decoder() {
  if (decodes_for(*decoder_, std::this_thread::get_id())) {
    throw Exception(ErrorCode::error,
                    "the value of the " + subject_.text() +
                        " is being decoded, and its decoding asks for this value: a from_state "
                        "function must not read the future that it decodes, nor one whose decoding "
                        "waits for it");
  }
  if (future_->of_parent() && !decoding_in_child_) {
    throw Exception(ErrorCode::closed, "this process was forked while another thread read the " +
                                           subject_.text() + ": read it before the fork");
  }
  if (decoding_ended_ == nullptr) {
    decoding_ended_ = std::make_shared<runtime::Future>(default_context());
  }
  const WaitingForDecoder waiting(*decoder_);
  const auto ended = decoding_ended_;
  wait_unlocked(std::nullopt, [&](Time deadline, const auto& interrupt) {
    return ended->wait(deadline, interrupt);
  });
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
  Py_VISIT(failure_.ptr());
  return 0;
}

void PyFuture::clear() {
  value_.reset();
  failure_.reset();
}

void bind_future(nb::module_& m) {
  auto future =
      public_class<PyFuture>(m, "moolink", "Future", nb::type_slots(collected_slots<PyFuture>),
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
