#include "bind/rpc.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/barrier.h"
#include "base/names.h"
#include "bind/bindings.h"
#include "bind/collector.h"
#include "bind/context.h"
#include "bind/describe.h"
#include "bind/device.h"
#include "bind/gil.h"
#include "transport/transports.h"

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
    R"(Explains how a peer is reached, or why it is not; returns a dict (see moolink.reports.Explanation).

"path" is the path in use ("none" if there is none), with its round trip in seconds ("latency",
smoothed, and "last_latency"; None before it is measured) and the "cipher" of TLS (None: data is not
encrypted, as within one host). "paths" lists every path, best first, with the "reason" if it is not
in use. "tried" lists the addresses that this peer could not reach, each with its error. "asked" lists
the peers from which it requested the addresses of the name. "reason" is a summary in one sentence.)";

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
  if (transports) options.transports = transport::kinds_named(*transports);
  options.keyring = crypto::Keyring(parse_keys(keys));
  options.key_origin = std::move(key_origin);
  peer_ = runtime::RpcPeer::create(default_context(), std::move(options));
  close_at_exit(peer_);
}

void PyRpc::close() {
  {
    const GilRelease unlocked;
    peer_->close();
  }
  release_dropped();
}

// close() may take seconds. The collector must not wait that long: no other thread can collect.
PyRpc::~PyRpc() {
  const bool handed_over =
      in_collection() && guard([this] { close_soon(peer_); }, [](const Error&) {});
  if (handed_over) {
    release_dropped();
  } else {
    close();
  }
}

void PyRpc::set_timeout(double seconds) {
  to_duration(seconds);
  timeout_ = seconds;
}

nb::object PyRpc::future_of(std::shared_ptr<runtime::Future> call, const std::string& peer,
                            const std::string& function,
                            std::shared_ptr<runtime::Future> released) const {
  return new_object<PyFuture>(std::move(call), decode_result_,
                              Subject{"call of", function, joined_names_text(peer)},
                              std::move(released));
}

// --- garbage collection: handlers often refer to the owner of the Rpc

int PyRpc::traverse(visitproc visit, void* arg) const {
  for (const auto& [name, function] : *functions_) Py_VISIT(function.get());
  return 0;
}

void PyRpc::clear() {
  functions_->clear();
  release_dropped();
}

namespace {

std::string repr(const PyRpc& self) {
  try {
    runtime::RpcPeer& peer = *self.peer();
    const std::string named = "<moolink.Rpc '" + peer.name() + "'";
    if (peer.closed()) return named + ", closed>";
    const std::vector<rpc::PeerInfo> peers = peer.peers();
    const auto connected = std::count_if(peers.begin(), peers.end(),
                                         [](const rpc::PeerInfo& info) { return info.connected; });
    return named + places_text(peer.addresses()) + ", connected to " + std::to_string(connected) +
           (connected == 1 ? " peer>" : " peers>");
  } catch (const Exception&) {  // this process is a forked child
    return "<moolink.Rpc of the parent process>";
  }
}

nb::dict stats(const PyRpc& self) {
  nb::dict stats = describe(without_gil([&] { return self.peer()->stats(); }));
  stats["copies"] = self.options().copies->describe();
  stats["cuda"] = cuda_info();
  return stats;
}

void bind_peer(nb::class_<PyRpc>& rpc) {
  rpc.def(nb::init<std::optional<std::string>, std::string_view, std::string_view, bool,
                   std::optional<std::vector<std::string>>, double,
                   const std::vector<PyRpc::PyKey>&, std::string>(),
          nb::arg("name") = nb::none(), nb::kw_only(), nb::arg("arrays") = "same",
          nb::arg("device") = "cpu", nb::arg("allow_pickle") = false,
          nb::arg("transports") = nb::none(), nb::arg("timeout") = kDefaultTimeout,
          nb::arg("keys") = std::vector<PyRpc::PyKey>(), nb::arg("key_origin") = "")
      .def("set_name", forward<PyRpc>(&runtime::RpcPeer::set_name), nb::arg("name"),
           nb::call_guard<GilRelease>(),
           "Names the peer; raises ValueError after the first connection.")
      .def("get_name", forward<PyRpc>(&runtime::RpcPeer::name), nb::call_guard<GilRelease>(),
           "Returns the peer's name.")
      .def("set_timeout", &PyRpc::set_timeout, nb::arg("seconds"),
           "Sets the time limit of each new call, in seconds.")
      .def("get_timeout", &PyRpc::timeout, "Returns the time limit of a call, in seconds.")
      .def(
          "set_transports",
          [](PyRpc& self, const std::vector<std::string>& names) {
            self.peer()->set_transports(transport::kinds_named(names));
          },
          nb::arg("names"), nb::call_guard<GilRelease>(),
          "Chooses among \"shm\", \"verbs\" and \"tcp\"; moolib's names and longer ones are "
          "accepted, too. Call it before the first listen or connect.")
      .def(
          "listen",
          [](PyRpc& self, const std::string& address, const std::optional<std::string>& advertise) {
            return self.peer()->listen(address, advertise.value_or(""));
          },
          nb::arg("address"), nb::arg("advertise") = nb::none(), nb::call_guard<GilRelease>(),
          kListenDoc)
      .def(
          "connect", forward<PyRpc>(&runtime::RpcPeer::connect), nb::arg("address"),
          nb::call_guard<GilRelease>(),
          "Connects to the peer that listens at \"host:port\" and keeps trying, now and whenever "
          "the connection is lost. Returns at once; raises ValueError if the address is malformed.")
      .def("close", &PyRpc::close,
           "Takes a moment to send the last replies, tells the peers, and makes pending calls fail "
           "with moolink.Closed. Further calls of close() do nothing.")
      .def("addresses", forward<PyRpc>(&runtime::RpcPeer::addresses), nb::call_guard<GilRelease>(),
           "Returns the addresses at which this peer can be reached.");
}

void bind_reports(nb::class_<PyRpc>& rpc) {
  rpc.def("stats", &stats,
          "Returns this peer's counts (see moolink.reports.RpcStats): calls, frames and bytes (of "
          "all "
          "paths, and of each in \"paths\"), connections, failed dials and peers. \"copies\" "
          "counts arrays that were copied although others would not have been, \"cuda\" the copies "
          "from and to CUDA devices.",
          nb::sig("def stats(self) -> moolink.reports.RpcStats"))
      .def(
          "peers",
          [](const PyRpc& self) {
            return describe(without_gil([&] { return self.peer()->peers(); }));
          },
          "Returns a dict for each other peer that is connected or waited for (see "
          "moolink.reports.PeerInfo): the paths that are up, latency (round trip in seconds), "
          "seconds of "
          "silence, unacknowledged bytes, and calls that wait and run.",
          nb::sig("def peers(self) -> list[moolink.reports.PeerInfo]"))
      .def(
          "explain",
          [](const PyRpc& self, const std::string& peer) {
            return describe(without_gil([&] { return self.peer()->explain(peer); }));
          },
          nb::arg("peer"), kExplainDoc,
          nb::sig("def explain(self, peer: str) -> moolink.reports.Explanation"))
      .def("flight_recorder", forward<PyRpc>(&runtime::RpcPeer::flight_recorder),
           nb::call_guard<GilRelease>(),
           "Returns the last events of this peer, oldest first, one a line: seconds before now, "
           "peer, kind, number of the call or connection, other peer, text. A process keeps 1,000 "
           "events.")
      .def("__repr__", &repr, nb::call_guard<GilRelease>());
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
