// The calls that a peer makes.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <utility>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/rpc.h"
#include "bind/stream.h"
#include "bind/user_code.h"

namespace moolink::bind {
namespace {

constexpr const char* kStreamDoc =
    R"(Calls a peer's function that yields; returns a Stream of its items.

The function is defined like any other, and is a generator or returns an iterator. Iterate over the
stream with `for` or `async for` to get the items as they come. The handler runs up to 16 items ahead
of the loop, and no thread waits in between. Leaving the loop and dropping the stream, or closing it,
closes the generator.

    for batch in rpc.stream("replay", "sample", 32):
        learn(batch)

Iteration raises the errors of a call (see async_), TimeoutError if no item came within the limit.)";

constexpr const char* kAsyncDoc =
    R"(Calls a function of a peer; returns a Future of its result.

The arguments are captured before this returns, except those in moolink.lend(...). Calls from one
thread to one peer start there in order. async_ does not block on the network; the future raises
every failure:

    NoSuchFunction: the peer has no such function.
    RemoteError: the handler raised.
    PeerLost: the peer died, restarted or was closed; `.ran` tells whether the call may have run.
    TimeoutError: no answer within the time limit (set_timeout, within).
    QueueFull: too many calls wait for this peer.)";

constexpr std::uint64_t kStreamCredit = 16;                   // items fetched ahead
constexpr std::size_t kSendUnlocked = std::size_t{64} << 10;  // a larger send releases the GIL

// Calls of one thread to one peer start in order; calls of two threads do not wait for one another.
std::uint16_t lane_of_this_thread() {
  static std::atomic<std::uint32_t> threads{0};
  thread_local const auto lane = static_cast<std::uint16_t>(1 + threads++ % 65535);
  return lane;
}

// Common to every kind of call.
struct Outgoing {
  wire::Payload payload;
  std::shared_ptr<runtime::Future> released;  // of its lent memory; null: it lends nothing
  Duration timeout;
  std::uint16_t lane;
};

// The time limit of a call; below zero: none, as in RpcPeer::call. No argument of a binding may be
// None here: nanobind would then take a handler's keyword `self` for the method's own.
Duration limit_of(double seconds) { return seconds < 0 ? Duration(-1) : to_duration(seconds); }

// `peer`: the only receiver; null: there are several.
Outgoing outgoing(const PyRpc& self, Duration limit, const std::string* peer,
                  const nb::args& arguments, const nb::kwargs& keywords) {
  park_if_exiting();
  release_dropped();
  Lender lender{self.peer()->context()};
  if (peer != nullptr) lender.recipient.emplace(runtime::Recipient{*self.peer(), peer});
  wire::Payload payload =
      encode_call(arguments, keywords, self.options(), self.peer()->context()->pool(), &lender);
  return {std::move(payload), std::move(lender.released), limit, lane_of_this_thread()};
}

// The name of a peer or a function, as the program gives it.
std::string name_given(nb::handle value, const char* argument) {
  if (!PyUnicode_Check(value.ptr())) {
    const std::string text = std::string(argument) + " must be a str, got ";
    throw nb::type_error((text + text_of(nb::repr(value))).c_str());
  }
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (data == nullptr) throw nb::python_error();  // a lone surrogate
  return {data, static_cast<std::size_t>(size)};
}

nb::object start(const PyRpc& self, const std::string& peer, const std::string& function,
                 Outgoing call) {
  std::shared_ptr<runtime::Future> future;
  if (call.payload.bytes() <= kSendUnlocked) {
    future = self.peer()->call_at_once(peer, function, call.payload, call.timeout, call.lane);
  }
  // Neither a long copy nor another thread's lock may stop the other Python threads.
  if (future == nullptr) {
    future = without_gil([&] {
      return self.peer()->call(peer, function, std::move(call.payload), call.timeout, call.lane);
    });
  }
  return self.future_of(std::move(future), peer, function, std::move(call.released));
}

nb::object begin(const PyRpc& self, Duration limit, nb::handle to, nb::handle function,
                 const nb::args& arguments, const nb::kwargs& keywords) {
  const std::string peer = name_given(to, "peer");
  const std::string called = name_given(function, "function");
  return start(self, peer, called, outgoing(self, limit, &peer, arguments, keywords));
}

nb::object async(const PyRpc& self, nb::handle peer, nb::handle function, const nb::args& arguments,
                 const nb::kwargs& keywords) {
  return begin(self, to_duration(self.timeout()), peer, function, arguments, keywords);
}

nb::object async_within(const PyRpc& self, double seconds, nb::handle peer, nb::handle function,
                        const nb::args& arguments, const nb::kwargs& keywords) {
  return begin(self, limit_of(seconds), peer, function, arguments, keywords);
}

nb::object sync(const PyRpc& self, nb::handle peer, nb::handle function, const nb::args& arguments,
                const nb::kwargs& keywords) {
  const nb::object future = async(self, peer, function, arguments, keywords);
  return nb::cast<PyFuture&>(future).result(std::nullopt);
}

void async_callback(const PyRpc& self, nb::handle peer, nb::handle function, nb::callable callback,
                    const nb::args& arguments, const nb::kwargs& keywords) {
  const nb::object started = async(self, peer, function, arguments, keywords);
  const auto& future = nb::cast<PyFuture&>(started).future();
  future->then([callback = Reference(std::move(callback)), outcome = Reference(started)] {
    const nb::object call = callback.borrow();
    auto& ended = nb::cast<PyFuture&>(nb::handle(outcome.get()));
    try {
      const nb::object error = ended.exception();
      const nb::object value = error.is_none() ? ended.value() : nb::none();
      call_python(call, nb::make_tuple(value, error), nb::dict());
    } catch (nb::python_error& e) {
      e.discard_as_unraisable(call);
    }
  });
}

nb::dict begin_many(const PyRpc& self, Duration limit, const std::vector<std::string>& peers,
                    const std::string& function, const nb::args& arguments,
                    const nb::kwargs& keywords) {
  const Outgoing call = outgoing(self, limit, nullptr, arguments, keywords);
  nb::dict futures;
  for (const std::string& peer : peers) {
    if (futures.contains(peer.c_str())) continue;
    auto future = without_gil([&] {
      // A call to this peer itself gives its bytes away to the handler; the others need them.
      wire::Payload own = peer == self.peer()->name()
                              ? wire::private_copy(call.payload, self.peer()->context()->pool())
                              : call.payload;
      return self.peer()->call(peer, function, std::move(own), call.timeout, call.lane);
    });
    futures[peer.c_str()] = self.future_of(std::move(future), peer, function, call.released);
  }
  return futures;
}

nb::dict async_many(const PyRpc& self, const std::vector<std::string>& peers,
                    const std::string& function, const nb::args& arguments,
                    const nb::kwargs& keywords) {
  return begin_many(self, to_duration(self.timeout()), peers, function, arguments, keywords);
}

nb::dict async_many_within(const PyRpc& self, double seconds, const std::vector<std::string>& peers,
                           const std::string& function, const nb::args& arguments,
                           const nb::kwargs& keywords) {
  return begin_many(self, limit_of(seconds), peers, function, arguments, keywords);
}

nb::object begin_stream(const PyRpc& self, Duration limit, nb::handle to, nb::handle called,
                        const nb::args& arguments, const nb::kwargs& keywords) {
  const std::string peer = name_given(to, "peer");
  const std::string function = name_given(called, "function");
  Outgoing call = outgoing(self, limit, &peer, arguments, keywords);
  auto stream = without_gil([&] {
    return self.peer()->stream(peer, function, std::move(call.payload), call.timeout, call.lane,
                               kStreamCredit);
  });
  return new_object<PyStream>(std::move(stream), self.shared_options());
}

nb::object stream(const PyRpc& self, nb::handle peer, nb::handle function,
                  const nb::args& arguments, const nb::kwargs& keywords) {
  return begin_stream(self, to_duration(self.timeout()), peer, function, arguments, keywords);
}

nb::object stream_within(const PyRpc& self, double seconds, nb::handle peer, nb::handle function,
                         const nb::args& arguments, const nb::kwargs& keywords) {
  return begin_stream(self, limit_of(seconds), peer, function, arguments, keywords);
}

}  // namespace

void bind_calls(nb::class_<PyRpc>& rpc) {
  rpc.def("async_", &async, kAsyncDoc,
          nb::sig("def async_(self, peer: str, function: str, /, *args: typing.Any, **kwargs: "
                  "typing.Any) -> Future"))
      .def(
          "_async_within", &async_within,
          "Like async_, with its own time limit in seconds. Below zero: none, the call waits until "
          "its peer is lost.",
          nb::sig("def _async_within(self, seconds: float, peer: str, function: str, /, "
                  "*args: typing.Any, **kwargs: typing.Any) -> Future"))
      .def("_async_many_within", &async_many_within,
           "Like async_many, with a time limit as in _async_within.",
           nb::sig("def _async_many_within(self, seconds: float, peers: "
                   "collections.abc.Sequence[str], function: str, /, *args: typing.Any, **kwargs: "
                   "typing.Any) -> dict[str, Future]"))
      .def("_stream_within", &stream_within,
           "Like stream, with a time limit of each item as in _async_within.",
           nb::sig("def _stream_within(self, seconds: float, peer: str, function: str, /, "
                   "*args: typing.Any, **kwargs: typing.Any) -> Stream"))
      .def("async_many", &async_many,
           "Calls a function of each of several peers, as async_ does; the arguments are encoded "
           "once. Returns a dict from peer to Future, in the order of `peers`.",
           nb::sig("def async_many(self, peers: collections.abc.Sequence[str], function: str, /, "
                   "*args: typing.Any, **kwargs: typing.Any) -> dict[str, Future]"))
      .def("async_callback", &async_callback,
           "Calls a function of a peer, as async_ does, and then `callback(result, error)` on a "
           "worker thread; error is None or the exception.",
           nb::sig("def async_callback(self, peer: str, function: str, callback: "
                   "typing.Callable[[typing.Any, BaseException | None], object], /, *args: "
                   "typing.Any, **kwargs: typing.Any) -> None"))
      .def("sync", &sync,
           "Calls a function of a peer, as async_ does, waits for the result and returns it, or "
           "raises the error.",
           nb::sig("def sync(self, peer: str, function: str, /, *args: typing.Any, **kwargs: "
                   "typing.Any) -> typing.Any"))
      .def("stream", &stream, kStreamDoc,
           nb::sig("def stream(self, peer: str, function: str, /, *args: typing.Any, **kwargs: "
                   "typing.Any) -> Stream"));
}

}  // namespace moolink::bind
