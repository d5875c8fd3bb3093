// The Python class of a peer.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/rpc.h"

namespace moolink::bind {
namespace {

constexpr double kDefaultTimeout = 120;  // seconds; moolib's

constexpr const char* kRpcDoc =
    R"(A peer: it has a unique name, calls functions of other peers and is called.

Peers find one another by name through any peer that both are connected to, usually a broker.

Args:
    name: unique among connected peers; default: a random one. See also set_name.
    arrays: the framework of received arrays: "same" (the sender's if it is imported here, else
        numpy), "numpy", "torch" or "jax".
    device: where received arrays of torch, JAX and CuPy are put: "cpu" (host memory, CuPy's as
        numpy arrays), "cuda:N", or "same": those that were sent from a CUDA device on the one of
        the same number, if this process has it. numpy arrays are always in host memory. Arrays are
        complete when they are handed over, whatever CUDA stream uses them.
    allow_pickle: sends objects other than values and arrays as pickles. Both sides must allow
        it and trust each other: unpickling runs code. A peer without a token must pass
        "insecure" instead of True.
    transports: some of "shm", "verbs" and "tcp"; the best one that reaches a peer is used. "verbs" is
        RDMA, which does not encrypt. Default: "shm" and "tcp"; "verbs", too, if the machine has a
        device and the environment variable MOOLINK_VERBS is 1 or the peer is insecure.
    timeout: time limit of a call, in seconds.
    token: the key that this peer shows and asks others for: the text of a token or of a group's
        key, or several, one a line (the first is shown, all are accepted), the path of its file as
        pathlib.Path, or a moolink.tokens.Key. Default: the file of `token_file`, else of the
        environment variable MOOLINK_TOKEN_FILE, else the user's own token, made at first use.
    token_file: path of such a file, which only its owner may be able to read.
    insecure: show no token and ask for none: any process that reaches the port may call
        every function.

Raises:
    moolink.AuthError: a token cannot be read or made, a text is no token, or others may read its
        file.
    ValueError: the arguments contradict one another, a name or option is invalid, or a transport
        is not available.

As a context manager, it closes itself at the end.)";

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
    TimeoutError: no answer within the time limit (set_timeout).
    QueueFull: too many calls wait for this peer.)";

constexpr const char* kListenDoc =
    R"(Listens on "host:port". Port 0 takes a free one; without a host, it listens on every interface.

Args:
    address: "host:port", "[v6]:port", ":port", "*:port", "tcp://...", or "shm://name".
    advertise: "host" or "host:port" that others are told instead of the bound addresses, if
        they reach this peer through a forwarded port or another name.

Returns:
    The addresses at which peers can connect. On every interface these are all addresses of the
    host (v4 and v6; loopback is tried by peers of this host only), or those that the environment
    variable MOOLINK_INTERFACE allows: names of interfaces and ranges, "eth0,10.0.0.0/8".

Raises:
    moolink.Error: the port is in use, or the host lacks such an address.
    ValueError: an address is malformed.)";

constexpr const char* kExplainDoc =
    R"(Explains how a peer is reached, or why it is not; returns a dict (see moolink.Explanation).

"path" is the path in use ("none" if there is none), with its round trip in seconds ("latency",
smoothed, and "last_latency"; None before it is measured) and the "cipher" of TLS (None: data is not
encrypted, as within one host). "paths" lists every path, best first, with the "reason" if it is not
in use. "tried" lists the addresses that this peer could not reach, each with its error. "asked" lists
the peers from which it requested the addresses of the name. "reason" is a summary in one sentence.)";

void bind_peer(nb::class_<PyRpc>& rpc) {
  rpc.def(nb::init<std::optional<std::string>, std::string_view, std::string_view, bool,
                   std::optional<std::vector<std::string>>, double,
                   const std::vector<PyRpc::PyKey>&, std::string>(),
          nb::arg("name") = nb::none(), nb::kw_only(), nb::arg("arrays") = "same",
          nb::arg("device") = "cpu", nb::arg("allow_pickle") = false,
          nb::arg("transports") = nb::none(), nb::arg("timeout") = kDefaultTimeout,
          nb::arg("keys") = std::vector<PyRpc::PyKey>(), nb::arg("key_origin") = "")
      .def("set_name", &PyRpc::set_name, nb::arg("name"), nb::call_guard<GilRelease>(),
           "Names the peer; raises ValueError after the first connection.")
      .def("get_name", &PyRpc::get_name, nb::call_guard<GilRelease>(), "Returns the peer's name.")
      .def("set_timeout", &PyRpc::set_timeout, nb::arg("seconds"),
           "Sets the time limit of each new call, in seconds.")
      .def("get_timeout", &PyRpc::get_timeout, "Returns the time limit of a call, in seconds.")
      .def("set_transports", &PyRpc::set_transports, nb::arg("names"), nb::call_guard<GilRelease>(),
           "Chooses among \"shm\", \"verbs\" and \"tcp\"; moolib's names and longer ones are "
           "accepted, too. Call it before the first listen or connect.")
      .def("listen", &PyRpc::listen, nb::arg("address"), nb::arg("advertise") = nb::none(),
           nb::call_guard<GilRelease>(), kListenDoc)
      .def("connect", &PyRpc::connect, nb::arg("address"), nb::call_guard<GilRelease>(),
           "Connects to the peer that listens at \"host:port\" and keeps trying, now and whenever "
           "the "
           "connection is lost. Returns at once; raises ValueError if the address is malformed.")
      .def("addresses", &PyRpc::addresses, nb::call_guard<GilRelease>(),
           "Returns the addresses at which this peer can be reached.");
}

void bind_functions(nb::class_<PyRpc>& rpc) {
  rpc.def("define", &PyRpc::define, nb::arg("name"), nb::arg("function"), kDefineDoc,
          nb::sig("def define(self, name: str, function: typing.Callable[..., typing.Any]) -> "
                  "None"))
      .def("_define_streamed", &PyRpc::define_streamed, nb::arg("name"), nb::arg("function"),
           "Like define_deferred, for calls by stream: the first argument is an RpcStreamReturn.",
           nb::sig("def _define_streamed(self, name: str, function: typing.Callable[..., "
                   "typing.Any]) -> None"))
      .def("define_deferred", &PyRpc::define_deferred, nb::arg("name"), nb::arg("function"),
           kDeferredDoc,
           nb::sig("def define_deferred(self, name: str, function: typing.Callable[..., "
                   "typing.Any]) -> None"))
      .def("_define_confined", &PyRpc::define_confined, nb::arg("name"), nb::arg("function"),
           nb::arg("group"),
           "Like define_deferred; peers that hold another group's key cannot call it.",
           nb::sig("def _define_confined(self, name: str, function: typing.Callable[..., "
                   "typing.Any], group: str) -> None"))
      .def("undefine", &PyRpc::undefine, nb::arg("name"),
           "Withdraws a function and waits until no call of it runs; a stream that has begun goes "
           "on. Raises ValueError if it is not defined.");
}

void bind_calls(nb::class_<PyRpc>& rpc) {
  rpc.def("async_", &PyRpc::async, kAsyncDoc,
          nb::sig("def async_(self, peer: str, function: str, /, *args: typing.Any, **kwargs: "
                  "typing.Any) -> Future"))
      .def("_async_within", &PyRpc::async_within,
           "Like async_, with its own time limit in seconds. None: the call waits until its peer "
           "is lost.",
           nb::sig("def _async_within(self, seconds: float | None, peer: str, function: str, /, "
                   "*args: typing.Any) -> Future"))
      .def("async_many", &PyRpc::async_many,
           "Calls a function of each of several peers, as async_ does; the arguments are encoded "
           "once. Returns a dict from peer to Future, in the order of `peers`.",
           nb::sig("def async_many(self, peers: collections.abc.Sequence[str], function: str, /, "
                   "*args: typing.Any, **kwargs: typing.Any) -> dict[str, Future]"))
      .def("async_callback", &PyRpc::async_callback,
           "Calls a function of a peer, as async_ does, and then `callback(result, error)` on a "
           "worker thread; error is None or the exception.",
           nb::sig("def async_callback(self, peer: str, function: str, callback: "
                   "typing.Callable[[typing.Any, BaseException | None], object], /, *args: "
                   "typing.Any, **kwargs: typing.Any) -> None"))
      .def("sync", &PyRpc::sync,
           "Calls a function of a peer, as async_ does, waits for the result and returns it, or "
           "raises the error.",
           nb::sig("def sync(self, peer: str, function: str, /, *args: typing.Any, **kwargs: "
                   "typing.Any) -> typing.Any"))
      .def("stream", &PyRpc::stream, kStreamDoc,
           nb::sig("def stream(self, peer: str, function: str, /, *args: typing.Any, **kwargs: "
                   "typing.Any) -> Stream"))
      .def("close", &PyRpc::close,
           "Takes a moment to send the last replies, tells the peers, and makes pending calls fail "
           "with moolink.Closed. Further calls of close() do nothing.");
}

void bind_reports(nb::class_<PyRpc>& rpc) {
  rpc.def("stats", &PyRpc::stats,
          "Returns this peer's counts (see moolink.RpcStats): calls, frames and bytes (of all "
          "paths, and of each in \"paths\"), connections, failed dials and peers. \"copies\" "
          "counts arrays that were copied although others would not have been, \"cuda\" the copies "
          "from and to CUDA devices.",
          nb::sig("def stats(self) -> moolink.reports.RpcStats"))
      .def("peers", &PyRpc::peers,
           "Returns a dict for each other peer that is connected or waited for (see "
           "moolink.PeerInfo): the paths that are up, latency (round trip in seconds), seconds of "
           "silence, unacknowledged bytes, and calls that wait and run.",
           nb::sig("def peers(self) -> list[moolink.reports.PeerInfo]"))
      .def("explain", &PyRpc::explain, nb::arg("peer"), kExplainDoc,
           nb::sig("def explain(self, peer: str) -> moolink.reports.Explanation"))
      .def("flight_recorder", &PyRpc::flight_recorder, nb::call_guard<GilRelease>(),
           "Returns the last events of this peer, oldest first, one a line: seconds before now, "
           "peer, kind, number of the call or connection, other peer, text. A process keeps 1,000 "
           "events.")
      .def("__repr__", &PyRpc::repr, nb::call_guard<GilRelease>());
}

}  // namespace

void bind_rpc(nb::module_& m) {
  nb::class_<PyRpc> rpc(m, "RpcCore", nb::type_slots(collected_slots<PyRpc>), kRpcDoc);
  bind_peer(rpc);
  bind_functions(rpc);
  bind_calls(rpc);
  bind_reports(rpc);
  def_context_manager(rpc);
}

}  // namespace moolink::bind
