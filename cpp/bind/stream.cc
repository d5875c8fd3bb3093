#include "bind/stream.h"

#include <utility>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/deferred.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/reference.h"
#include "bind/user_code.h"

namespace moolink::bind {
namespace {

// Runs a handler that yields until the caller takes no more, and continues when it does.
class Yielder : public std::enable_shared_from_this<Yielder> {
 public:
  Yielder(std::shared_ptr<runtime::Responder> responder, nb::object iterator,
          std::shared_ptr<const ValueOptions> options)
      : responder_(std::move(responder)),
        iterator_(std::move(iterator)),
        options_(std::move(options)) {}

  void run() {
    while (!responder_->cancelled()) {
      if (!responder_->has_room()) {
        responder_->when_room([self = shared_from_this()] { self->run(); });
        return;
      }
      if (!send_next()) return;
    }
    close();
  }

 private:
  // False: that was the last one.
  bool send_next() {
    const nb::object iterator = iterator_.borrow();
    const nb::object item = run_user_code([&] { return PyIter_Next(iterator.ptr()); });
    if (!item.is_valid()) {
      if (PyErr_Occurred() == nullptr) {
        send_value(*responder_, nb::none(), *options_);
      } else {
        nb::python_error raised;
        responder_->send(to_remote_error(raised, responder_->function()));
      }
      return false;
    }
    try {
      send_item(*responder_, item, *options_);
      return true;
    } catch (nb::python_error& e) {
      responder_->send(to_remote_error(e, responder_->function()));
    } catch (const std::exception& e) {
      responder_->send(unsendable(*responder_, "an item", e.what()));
    }
    close();
    return false;
  }

  // The caller is gone: runs the generator's finally clauses.
  void close() {
    const nb::object iterator = iterator_.borrow();
    if (!nb::hasattr(iterator, "close")) return;
    try {
      iterator.attr("close")();
    } catch (nb::python_error& e) {
      e.discard_as_unraisable(iterator);
    }
  }

  std::shared_ptr<runtime::Responder> responder_;
  Reference iterator_;
  std::shared_ptr<const ValueOptions> options_;
};

}  // namespace

void send_stream(const std::shared_ptr<runtime::Responder>& responder, nb::object iterator,
                 const std::shared_ptr<const ValueOptions>& options) {
  std::make_shared<Yielder>(responder, std::move(iterator), options)->run();
}

// --- at the caller

std::optional<nb::object> PyStream::take() {
  await_engine(stream_->context());
  const std::optional<wire::Payload> item = stream_->take();
  if (!item) return std::nullopt;
  return decode_value(*item, *options_);
}

// Raises the stream's outcome; an error only once, like a generator.
void PyStream::end(PyObject* stop) {
  const Error* error = std::get_if<Error>(&stream_->outcome());
  if (error != nullptr && !std::exchange(raised_, true)) {
    set_raised(to_exception(*error, stream_->detail()));
  } else {
    PyErr_SetNone(stop);
  }
  throw nb::python_error();
}

nb::object PyStream::next() {
  park_if_exiting();
  const auto interrupt = signal_check();
  while (true) {
    if (std::optional<nb::object> item = take()) return *std::move(item);
    if (stream_->ended()) end(PyExc_StopIteration);
    const GilRelease unlocked;
    stream_->wait(kNever, interrupt);
  }
}

nb::tuple PyStream::poll() {
  if (const std::optional<nb::object> item = take()) return nb::make_tuple(*item, true);
  if (stream_->ended()) end(PyExc_StopAsyncIteration);
  return nb::make_tuple(nb::none(), false);
}

void PyStream::close() {
  await_engine(stream_->context());
  stream_->cancel();
}

void bind_stream(nb::module_& m) {
  auto stream = public_class<PyStream>(
      m, "moolink.rpc", "Stream",
      "The items that a handler yields, in order. Iterate over it with `for` or `async for`. A few "
      "items are fetched ahead; the handler continues as they are taken.\n\nIteration raises the "
      "errors of a call: moolink.TimeoutError if no item came within the peer's timeout, "
      "moolink.RemoteError after the items that the handler yielded before it raised, "
      "moolink.PeerLost, ... It raises an error once; after that, iteration ends at once.");
  const auto itself = [](nb::handle self) { return nb::borrow(self); };
  stream.def("__iter__", itself, nb::sig("def __iter__(self) -> Stream"))
      .def("__next__", &PyStream::next, nb::sig("def __next__(self) -> typing.Any"))
      .def("__aiter__", itself, nb::sig("def __aiter__(self) -> Stream"))
      .def(
          "__anext__",
          [](nb::handle self) {
            return nb::module_::import_("moolink.rpc.asyncio_bridge").attr("next_item")(self);
          },
          nb::sig("def __anext__(self) -> typing.Coroutine[typing.Any, typing.Any, typing.Any]"))
      .def("_poll", &PyStream::poll,
           "Returns (item, True) if an item has arrived, else (None, False).",
           nb::sig("def _poll(self) -> tuple[typing.Any, bool]"))
      .def("close", &PyStream::close,
           "Stops the handler and closes its generator; iteration then raises CancelledError after "
           "the items that had arrived. Dropping the stream does the same.");
  def_context_manager(stream);
}

}  // namespace moolink::bind
