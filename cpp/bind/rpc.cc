#include "bind/rpc.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstring>
#include <utility>

#include "bind/context.h"
#include "bind/deferred.h"
#include "bind/describe.h"
#include "bind/device.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/stream.h"

namespace moolink::bind {
namespace {

constexpr double kDefaultTimeout = 120;                       // seconds; moolib's
constexpr std::uint64_t kStreamCredit = 16;                   // items fetched ahead
constexpr std::size_t kSendUnlocked = std::size_t{64} << 10;  // a larger send gives up the GIL

// Calls of one thread to one peer start in their order; those of two threads do not wait for one
// another.
std::uint16_t lane_of_this_thread() {
  static std::atomic<std::uint32_t> threads{0};
  thread_local const auto lane = static_cast<std::uint16_t>(1 + threads++ % 65535);
  return lane;
}

wire::PathKind parse_transport(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  if (name == "tcp" || name == "tcp/ip") return wire::PathKind::tcp;
  if (name == "shm" || name == "shared memory" || name == "ipc") return wire::PathKind::shm;
  if (name == "verbs" || name == "infiniband") {
    throw Exception(ErrorCode::invalid_argument,
                    "transport '" + name + "' (InfiniBand) does not exist yet: leave it out");
  }
  throw Exception(ErrorCode::invalid_argument,
                  "transport '" + name + "' is not one of tcp (tcp/ip), shm (shared memory, ipc)");
}

std::vector<wire::PathKind> parse_transports(const std::vector<std::string>& names) {
  std::vector<wire::PathKind> kinds;
  for (const std::string& name : names) {
    const wire::PathKind kind = parse_transport(name);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  if (kinds.empty())
    throw Exception(ErrorCode::invalid_argument, "at least one transport is needed");
  return kinds;
}

// Runs a handler: an exception of any kind goes to the caller, never further.
template <class Run>
void serve(const runtime::Incoming& call, Run&& run) {
  const std::string& function = call.responder->function();
  try {
    run();
  } catch (nb::python_error& e) {
    send_raised(*call.responder, e);
  } catch (const nb::builtin_exception& e) {
    call.responder->send(
        Error{ErrorCode::remote, e.what(), {}, function, "TypeError", {}, Ran::yes});
  } catch (const Exception& e) {
    call.responder->send(e.error());
  }
}

nb::object function_named(const std::weak_ptr<std::map<std::string, Reference>>& functions,
                          const std::string& name) {
  if (const auto table = functions.lock()) {
    const auto found = table->find(name);
    if (found != table->end()) return found->second.borrow();
  }
  throw Exception(Error{ErrorCode::no_such_function,
                        "the function '" + name + "' is gone",
                        {},
                        name,
                        {},
                        {},
                        Ran::no});
}

nb::object call_python(nb::handle function, nb::handle arguments, nb::handle keywords) {
  nb::object result = nb::steal(
      survive_exit([&] { return PyObject_Call(function.ptr(), arguments.ptr(), keywords.ptr()); }));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

// Calls a function that replies itself: its first argument is the way back.
template <class Return>
void call_with_return(const nb::object& function, const runtime::Incoming& call,
                      const std::shared_ptr<const ValueOptions>& options) {
  const auto [arguments, keywords] = decode_call(call.arguments, *options);
  const nb::object reply =
      nb::cast(new Return(call.responder, options), nb::rv_policy::take_ownership);
  const nb::object all = nb::steal(PySequence_Concat(nb::make_tuple(reply).ptr(), arguments.ptr()));
  call_python(function, all, keywords);
}

void reply_with(const std::shared_ptr<runtime::Responder>& responder, nb::object result,
                const std::shared_ptr<const ValueOptions>& options) {
  const bool yields = PyIter_Check(result.ptr()) != 0;
  if (responder->streamed() && yields) {
    send_stream(responder, std::move(result), options);
  } else if (responder->streamed() || PyGen_Check(result.ptr())) {
    throw nb::type_error(responder->streamed()
                             ? "the handler returns no iterator: call it with async_ or sync"
                             : "the handler is a generator: call it with stream");
  } else {
    send_value(*responder, result, *options);
  }
}

std::vector<crypto::Key> parse_keys(const std::vector<PyRpc::PyKey>& keys) {
  std::vector<crypto::Key> parsed;
  for (const auto& [secret, scope] : keys) {
    crypto::Key key;
    if (secret.size() != key.secret.size()) {
      throw Exception(ErrorCode::invalid_argument, "a key has 32 bytes");
    }
    std::memcpy(key.secret.data(), secret.data(), key.secret.size());
    key.scope = scope;
    parsed.push_back(std::move(key));
  }
  return parsed;
}

}  // namespace

// --- life

PyRpc::PyRpc(std::optional<std::string> name, std::string_view arrays, std::string_view device,
             bool allow_pickle, std::optional<std::vector<std::string>> transports, double timeout,
             const std::vector<PyKey>& keys, std::string key_origin)
    : functions_(std::make_shared<Functions>()), timeout_(timeout) {
  to_duration(timeout);
  ValueOptions values;
  values.arrays = parse_array_kind(arrays);
  values.device = parse_device(device);
  values.allow_pickle = allow_pickle;
  values.copies = std::make_shared<CopyCounts>();
  options_ = std::make_shared<const ValueOptions>(values);
  decode_result_ = std::make_shared<const PyFuture::Decode>(
      [options = options_](const wire::Payload& result) { return decode_value(result, *options); });
  runtime::RpcOptions options;
  options.name = name.value_or("");
  if (transports) options.transports = parse_transports(*transports);
  options.keyring = crypto::Keyring(parse_keys(keys));
  options.key_origin = std::move(key_origin);
  peer_ = runtime::RpcPeer::create(default_context(), std::move(options));
  close_at_exit(peer_);
}

PyRpc::~PyRpc() { close(); }

void PyRpc::close() {
  {
    const GilRelease unlocked;
    peer_->close();
  }
  release_dropped();
}

void PyRpc::set_timeout(double seconds) {
  to_duration(seconds);
  timeout_ = seconds;
}

void PyRpc::set_transports(const std::vector<std::string>& names) {
  peer_->set_transports(parse_transports(names));
}

std::vector<std::string> PyRpc::listen(const std::string& address,
                                       const std::optional<std::string>& advertise) {
  const GilRelease unlocked;
  return peer_->listen(address, advertise.value_or(""));
}

// --- handlers

runtime::CallHandler PyRpc::plain_handler(std::weak_ptr<Functions> functions,
                                          const std::string& name,
                                          std::shared_ptr<const ValueOptions> options) {
  return [functions, name, options](const runtime::Incoming& call) {
    serve(call, [&] {
      const nb::object function = function_named(functions, name);
      const auto [arguments, keywords] = decode_call(call.arguments, *options);
      reply_with(call.responder, call_python(function, arguments, keywords), options);
    });
  };
}

runtime::CallHandler PyRpc::deferred_handler(std::weak_ptr<Functions> functions,
                                             const std::string& name,
                                             std::shared_ptr<const ValueOptions> options) {
  return [functions, name, options](const runtime::Incoming& call) {
    serve(call, [&] {
      if (call.responder->streamed()) {
        throw nb::type_error("the function replies once: call it with async_ or sync");
      }
      call_with_return<PyDeferred>(function_named(functions, name), call, options);
    });
  };
}

runtime::CallHandler PyRpc::streamed_handler(std::weak_ptr<Functions> functions,
                                             const std::string& name,
                                             std::shared_ptr<const ValueOptions> options) {
  return [functions, name, options](const runtime::Incoming& call) {
    serve(call, [&] {
      if (!call.responder->streamed()) {
        throw nb::type_error("the handler is a generator: call it with stream");
      }
      call_with_return<PyStreamReturn>(function_named(functions, name), call, options);
    });
  };
}

void PyRpc::add_function(const std::string& name, nb::callable function,
                         runtime::CallHandler (*make)(std::weak_ptr<Functions>, const std::string&,
                                                      std::shared_ptr<const ValueOptions>),
                         const std::string& group) {
  peer_->define(name, make(functions_, name, options_), group);
  (*functions_)[name] = Reference(std::move(function));
}

void PyRpc::define(const std::string& name, nb::callable function) {
  add_function(name, std::move(function), &PyRpc::plain_handler);
}

void PyRpc::define_deferred(const std::string& name, nb::callable function) {
  add_function(name, std::move(function), &PyRpc::deferred_handler);
}

void PyRpc::define_confined(const std::string& name, nb::callable function,
                            const std::string& group) {
  add_function(name, std::move(function), &PyRpc::deferred_handler, group);
}

void PyRpc::define_streamed(const std::string& name, nb::callable function) {
  add_function(name, std::move(function), &PyRpc::streamed_handler);
}

void PyRpc::undefine(const std::string& name) {
  bool defined = false;
  const auto interrupt = signal_check();
  // Taken out first: while this waits for running calls, another thread may define the name anew.
  auto function = functions_->extract(name);
  {
    const GilRelease unlocked;
    defined = peer_->undefine(name, interrupt);
  }
  if (!defined) {
    throw Exception(ErrorCode::invalid_argument, "function '" + name + "' is not defined");
  }
  function = {};
  release_dropped();
}

// --- calls

PyRpc::Outgoing PyRpc::outgoing(const std::string* peer, const nb::args& arguments,
                                const nb::kwargs& keywords) const {
  park_if_exiting();
  release_dropped();
  Lender lender{peer_->context()};
  if (peer != nullptr) lender.place = [&](std::size_t bytes) { return peer_->place(*peer, bytes); };
  wire::Payload payload =
      encode_call(arguments, keywords, *options_, peer_->context()->pool(), &lender);
  return {std::move(payload), std::move(lender.released), to_duration(timeout_),
          lane_of_this_thread()};
}

nb::object PyRpc::async(const std::string& peer, const std::string& function,
                        const nb::args& arguments, const nb::kwargs& keywords) {
  Outgoing call = outgoing(&peer, arguments, keywords);
  std::shared_ptr<runtime::Future> future;
  if (call.payload.bytes() > kSendUnlocked) {
    const GilRelease unlocked;
    future = peer_->call(peer, function, std::move(call.payload), call.timeout, call.lane);
  } else {
    future = peer_->call(peer, function, std::move(call.payload), call.timeout, call.lane);
  }
  return future_of(std::move(future), peer, function, std::move(call.released));
}

nb::dict PyRpc::async_many(const std::vector<std::string>& peers, const std::string& function,
                           const nb::args& arguments, const nb::kwargs& keywords) {
  const Outgoing call = outgoing(nullptr, arguments, keywords);
  nb::dict futures;
  for (const std::string& peer : peers) {
    if (futures.contains(peer.c_str())) continue;
    std::shared_ptr<runtime::Future> future;
    {
      const GilRelease unlocked;
      // A call of itself decodes the very bytes that are sent to the others.
      wire::Payload own = peer == peer_->name()
                              ? wire::private_copy(call.payload, peer_->context()->pool())
                              : call.payload;
      future = peer_->call(peer, function, std::move(own), call.timeout, call.lane);
    }
    futures[peer.c_str()] = future_of(std::move(future), peer, function, call.released);
  }
  return futures;
}

nb::object PyRpc::future_of(std::shared_ptr<runtime::Future> future, const std::string& peer,
                            const std::string& function,
                            std::shared_ptr<runtime::Future> released) const {
  return nb::cast(new PyFuture(std::move(future), decode_result_,
                               Subject{"call of", function, peer}, std::move(released)),
                  nb::rv_policy::take_ownership);
}

nb::object PyRpc::stream(const std::string& peer, const std::string& function,
                         const nb::args& arguments, const nb::kwargs& keywords) {
  Outgoing call = outgoing(&peer, arguments, keywords);
  std::shared_ptr<runtime::Stream> stream;
  {
    const GilRelease unlocked;
    stream = peer_->stream(peer, function, std::move(call.payload), call.timeout, call.lane,
                           kStreamCredit);
  }
  return nb::cast(new PyStream(std::move(stream), options_), nb::rv_policy::take_ownership);
}

// --- what is going on

nb::dict PyRpc::stats() const {
  nb::dict stats = describe(peer_->stats());
  stats["copies"] = options_->copies->describe();
  stats["cuda"] = cuda_info();
  return stats;
}

nb::list PyRpc::peers() const { return describe(peer_->peers()); }

nb::dict PyRpc::explain(const std::string& peer) const { return describe(peer_->explain(peer)); }

// --- garbage collection: handlers often refer to what holds the Rpc

int PyRpc::traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const auto& [name, function] : *nb::inst_ptr<PyRpc>(self)->functions_) {
    Py_VISIT(function.get());
  }
  return 0;
}

int PyRpc::clear(PyObject* self) {
  nb::inst_ptr<PyRpc>(self)->functions_->clear();
  release_dropped();
  return 0;
}

namespace {

nb::object sync(PyRpc& self, const std::string& peer, const std::string& function,
                const nb::args& arguments, const nb::kwargs& keywords) {
  const nb::object future = self.async(peer, function, arguments, keywords);
  return nb::cast<PyFuture&>(future).result(std::nullopt);
}

void async_callback(PyRpc& self, const std::string& peer, const std::string& function,
                    nb::callable callback, const nb::args& arguments, const nb::kwargs& keywords) {
  const nb::object started = self.async(peer, function, arguments, keywords);
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

PyType_Slot rpc_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&PyRpc::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&PyRpc::clear)},
    {0, nullptr},
};

constexpr const char* kRpcDoc =
    R"(A peer: it has a unique name, calls functions of other peers and is called.

Peers find one another by name through any peer that both are connected to, usually a broker.

Args:
    name: unique among connected peers; default: a random one. See also set_name.
    arrays: what received arrays become: "same" (the sender's framework if it is imported here, else
        numpy), "numpy", "torch" or "jax".
    device: where received arrays of torch, JAX and CuPy are put: "cpu" (host memory, CuPy's as
        numpy arrays), "cuda:N", or "same": those that were sent from a CUDA device on the one of
        the same number, if this process has it. numpy arrays are always in host memory. Arrays are
        complete when they are handed over, for every stream.
    allow_pickle: lets other objects than values and arrays travel as pickles; both sides must
        allow it, and trust one another: unpickling runs code.
    transports: of "shm" and "tcp"; default: both, the better one is used.
    timeout: life of a call in seconds.
    token: what this peer proves itself with and asks of others: the text of a token or of a group's
        key, several on lines of their own (the first is shown, all are accepted), or the path of
        its file as pathlib.Path. Default: the file of `token_file`, else of the environment
        variable MOOLINK_TOKEN_FILE, else the user's own token, made at first use.
    token_file: path of such a file, which nobody but its owner may read.
    insecure: show no token and ask for none: anybody who reaches the port may call every function.

Raises:
    moolink.AuthError: a token cannot be read or made, or is none, or others may read its file.
    ValueError: the arguments contradict one another, or a name or option is none.

It is a context manager that closes itself.)";

constexpr const char* kDefineDoc =
    R"(Lets peers call `function` by `name`.

It runs on a worker thread with the caller's arguments; what it returns is the reply. What it raises
is raised at the caller as moolink.RemoteError, with type, text and traceback. It may make blocking
calls itself.

Raises:
    ValueError: the name is defined already.)";

constexpr const char* kDeferredDoc =
    R"(Like define, but `function` gets an RpcDeferredReturn as its first argument, to reply
later and from any thread: `deferred(value)` or `deferred.error(exception)`. Dropped without a reply,
the caller is told so at once.)";

constexpr const char* kStreamDoc =
    R"(stream(peer, function, *args, **kwargs): calls a function that yields; returns a Stream.

The function, defined as any other, is a generator or returns an iterator. Iterate over the stream,
with `for` or `async for`, to get the items as they come. The handler is run 16 items ahead of what
was taken, and no thread waits between. Leaving the loop and dropping the stream, or closing it,
closes the generator.

    for batch in rpc.stream("replay", "sample", 32):
        learn(batch)

Iterating raises what a call would, see async_; TimeoutError if no item came for the time limit.)";

constexpr const char* kAsyncDoc =
    R"(async_(peer, function, *args, **kwargs): calls a function of a peer; returns a Future.

The arguments are captured before this returns, but for what is in moolink.lend(...). Calls of one thread to one peer start there in their
order. Does not block on the network; every failure is the future's:

    NoSuchFunction: the peer has no such function.
    RemoteError: the handler raised.
    PeerLost: the peer died, restarted or was closed; `.ran` tells whether the call may have run.
    TimeoutError: no answer within the time limit (set_timeout).
    QueueFull: too many calls wait for this peer.)";

constexpr const char* kListenDoc =
    R"(Listens on "host:port"; port 0 takes a free one, no host means every interface.

Args:
    address: "host:port", "[v6]:port", ":port", "*:port", "tcp://...", or "shm://name".
    advertise: "host" or "host:port" that others are told instead of the bound addresses, where
        they reach this peer through a forwarded port or another name.

Returns:
    The addresses at which peers can connect. On every interface these are all addresses of the
    host (v4 and v6; loopback is tried by peers of this host only), or those that the environment
    variable MOOLINK_INTERFACE allows: names of interfaces and ranges, "eth0,10.0.0.0/8".

Raises:
    moolink.Error: the port is in use, or the host lacks such an address.
    ValueError: an address is malformed.)";

constexpr const char* kExplainDoc =
    R"(How a peer is reached, or why it is not: a dict, as moolink._core.Explanation.

"path" is the path in use ("none" if there is none), with its round trip in seconds ("latency",
smoothed, and "last_latency"; None before it is measured) and the "cipher" of TLS (None: what is
sent is not encrypted, as within one host). "paths" has every path, best first, with
"reason" for each that is not in use; "tried" the addresses that were dialled in vain and what each
said; "asked" the peers that were asked for the name; "reason" sums it up in one sentence.)";

void bind_class(nb::class_<PyRpc>& rpc) {
  rpc.def(nb::init<std::optional<std::string>, std::string_view, std::string_view, bool,
                   std::optional<std::vector<std::string>>, double,
                   const std::vector<PyRpc::PyKey>&, std::string>(),
          nb::arg("name") = nb::none(), nb::kw_only(), nb::arg("arrays") = "same",
          nb::arg("device") = "cpu", nb::arg("allow_pickle") = false,
          nb::arg("transports") = nb::none(), nb::arg("timeout") = kDefaultTimeout,
          nb::arg("keys") = std::vector<PyRpc::PyKey>(), nb::arg("key_origin") = "")
      .def("set_name", &PyRpc::set_name, nb::arg("name"),
           "Names the peer; raises ValueError after the first connection.")
      .def("get_name", &PyRpc::get_name, "The peer's name.")
      .def("set_timeout", &PyRpc::set_timeout, nb::arg("seconds"),
           "Life of each new call in seconds.")
      .def("get_timeout", &PyRpc::get_timeout, "Life of a call in seconds.")
      .def("set_transports", &PyRpc::set_transports, nb::arg("names"),
           "Chooses among \"shm\" and \"tcp\" (moolib's and longer names are known too) before "
           "the first listen or connect.")
      .def("listen", &PyRpc::listen, nb::arg("address"), nb::arg("advertise") = nb::none(),
           kListenDoc)
      .def("connect", &PyRpc::connect, nb::arg("address"),
           "Connects to whoever listens at \"host:port\" and keeps trying, now and whenever the "
           "connection is lost. Returns at once; raises ValueError if the address is malformed.")
      .def("addresses", &PyRpc::addresses, "Where this peer can be reached.")
      .def("define", &PyRpc::define, nb::arg("name"), nb::arg("function"), kDefineDoc)
      .def("define_streamed", &PyRpc::define_streamed, nb::arg("name"), nb::arg("function"),
           "Like define_deferred, of calls by stream: the first argument is an RpcStreamReturn.")
      .def("define_deferred", &PyRpc::define_deferred, nb::arg("name"), nb::arg("function"),
           kDeferredDoc)
      .def("define_confined", &PyRpc::define_confined, nb::arg("name"), nb::arg("function"),
           nb::arg("group"),
           "Like define_deferred; peers that hold another group's key cannot call it.")
      .def("undefine", &PyRpc::undefine, nb::arg("name"),
           "Withdraws a function and waits until no call of it runs; a stream that has begun goes "
           "on. Raises ValueError if it is not defined.")
      .def("async_", &PyRpc::async, kAsyncDoc)
      .def("async_many", &PyRpc::async_many,
           "async_many(peers, function, *args, **kwargs): like async_ to each of several peers; "
           "the arguments are encoded once. Returns a dict from peer to Future, in their order.")
      .def("async_callback", &async_callback,
           "async_callback(peer, function, callback, *args, **kwargs): like async_, and calls "
           "`callback(result, error)` on a worker thread; error is None or the exception.")
      .def("sync", &sync,
           "sync(peer, function, *args, **kwargs): like async_, and waits for the result.")
      .def("stream", &PyRpc::stream, kStreamDoc)
      .def("close", &PyRpc::close,
           "Flushes replies for a moment, says goodbye to the peers and fails pending calls with "
           "moolink.Closed. More calls of it do nothing.")
      .def(
          "stats", &PyRpc::stats,
          "Counters since the beginning, as moolink._core.RpcStats: calls, frames and bytes (all "
          "paths, and by path in \"paths\"), connections, failed dials, peers; in \"copies\" those "
          "of arrays that others would have saved, in \"cuda\" those from and to CUDA devices.")
      .def("peers", &PyRpc::peers,
           "The other peers that are connected or waited for, a dict each, as "
           "moolink._core.PeerInfo: the paths that are up, latency (round trip in seconds) and "
           "seconds of silence, bytes not acknowledged, calls that wait and run.")
      .def("explain", &PyRpc::explain, nb::arg("peer"), kExplainDoc)
      .def("flight_recorder", &PyRpc::flight_recorder,
           "The last events of this peer, oldest first, a line each: seconds before now, peer, "
           "kind, number of the call or connection, other peer, text. A context keeps 1,000.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](PyRpc& self, const nb::args&) { self.close(); });
}

}  // namespace

void bind_rpc(nb::module_& m) {
  nb::class_<PyRpc> rpc(m, "RpcCore", nb::type_slots(rpc_slots), kRpcDoc);
  bind_class(rpc);
}

}  // namespace moolink::bind
