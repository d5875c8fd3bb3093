#include "bind/rpc.h"

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
#include "bind/user_code.h"
#include "transport/verbs/availability.h"

namespace moolink::bind {
namespace {

constexpr std::uint64_t kStreamCredit = 16;                   // items fetched ahead
constexpr std::size_t kSendUnlocked = std::size_t{64} << 10;  // a larger send releases the GIL

// Calls of one thread to one peer start in order; calls of two threads do not wait for one another.
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
    const transport::verbs::Availability& found = transport::verbs::availability();
    if (found.usable) return wire::PathKind::verbs;
    throw Exception(ErrorCode::invalid_argument, "transport '" + name +
                                                     "' cannot be used on this machine (" +
                                                     found.reason + "): leave it out");
  }
  throw Exception(ErrorCode::invalid_argument,
                  "transport '" + name +
                      "' is not one of shm (shared memory, ipc), verbs (infiniband) and tcp "
                      "(tcp/ip)");
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
    call.responder->send(Error{.code = ErrorCode::remote,
                               .message = e.what(),
                               .function = function,
                               .remote_type = "TypeError",
                               .ran = Ran::yes});
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
  throw Exception(Error{.code = ErrorCode::no_such_function,
                        .message = "the function '" + name + "' is gone",
                        .function = name});
}

nb::object call_python(nb::handle function, nb::handle arguments, nb::handle keywords) {
  nb::object result =
      run_user_code([&] { return PyObject_Call(function.ptr(), arguments.ptr(), keywords.ptr()); });
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

// Calls a function that replies itself: its first argument is the reply path.
template <class Return>
void call_with_return(const nb::object& function, const runtime::Incoming& call,
                      const std::shared_ptr<const ValueOptions>& options) {
  const auto [arguments, keywords] = decode_call(call.arguments, *options);
  const nb::object reply =
      nb::cast(new Return(call.responder, options), nb::rv_policy::take_ownership);
  const nb::object all = nb::steal(PySequence_Concat(nb::make_tuple(reply).ptr(), arguments.ptr()));
  call_python(function, all, keywords);
}

bool is_generator(nb::handle value) {
  return value.type().is(nb::module_::import_("types").attr("GeneratorType"));
}

void reply_with(const std::shared_ptr<runtime::Responder>& responder, nb::object result,
                const std::shared_ptr<const ValueOptions>& options) {
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

using Options = std::shared_ptr<const ValueOptions>;

void run_plain(const nb::object& function, const runtime::Incoming& call, const Options& options) {
  const auto [arguments, keywords] = decode_call(call.arguments, *options);
  reply_with(call.responder, call_python(function, arguments, keywords), options);
}

void run_deferred(const nb::object& function, const runtime::Incoming& call,
                  const Options& options) {
  if (call.responder->streamed()) {
    throw nb::type_error("the function replies once: call it with async_ or sync");
  }
  call_with_return<PyDeferred>(function, call, options);
}

void run_streamed(const nb::object& function, const runtime::Incoming& call,
                  const Options& options) {
  if (!call.responder->streamed()) {
    throw nb::type_error("the handler is a generator: call it with stream");
  }
  call_with_return<PyStreamReturn>(function, call, options);
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
  return peer_->listen(address, advertise.value_or(""));
}

// --- handlers

void PyRpc::add_function(const std::string& name, nb::callable function, Run run,
                         const std::string& group) {
  {
    const GilRelease unlocked;
    auto handler = [functions = std::weak_ptr(functions_), name, options = options_,
                    run](const runtime::Incoming& call) {
      serve(call, [&] { run(function_named(functions, name), call, options); });
    };
    peer_->define(name, std::move(handler), group);
  }
  (*functions_)[name] = Reference(std::move(function));
}

void PyRpc::define(const std::string& name, nb::callable function) {
  add_function(name, std::move(function), run_plain);
}

void PyRpc::define_deferred(const std::string& name, nb::callable function) {
  add_function(name, std::move(function), run_deferred);
}

void PyRpc::define_confined(const std::string& name, nb::callable function,
                            const std::string& group) {
  add_function(name, std::move(function), run_deferred, group);
}

void PyRpc::define_streamed(const std::string& name, nb::callable function) {
  add_function(name, std::move(function), run_streamed);
}

void PyRpc::undefine(const std::string& name) {
  const auto interrupt = signal_check();
  // Extracted first: while this waits for running calls, another thread may define the name again.
  auto function = functions_->extract(name);
  if (!without_gil([&] { return peer_->undefine(name, interrupt); })) {
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
  if (peer != nullptr) lender.recipient.emplace(*peer_, *peer);
  wire::Payload payload =
      encode_call(arguments, keywords, *options_, peer_->context()->pool(), &lender);
  return {std::move(payload), std::move(lender.released), to_duration(timeout_),
          lane_of_this_thread()};
}

nb::object PyRpc::async(const std::string& peer, const std::string& function,
                        const nb::args& arguments, const nb::kwargs& keywords) {
  return start(peer, function, outgoing(&peer, arguments, keywords));
}

nb::object PyRpc::async_within(std::optional<double> seconds, const std::string& peer,
                               const std::string& function, const nb::args& arguments) {
  Outgoing call = outgoing(&peer, arguments, {});
  call.timeout = seconds ? to_duration(*seconds) : Duration(-1);
  return start(peer, function, std::move(call));
}

nb::object PyRpc::start(const std::string& peer, const std::string& function, Outgoing call) const {
  std::shared_ptr<runtime::Future> future;
  if (call.payload.bytes() <= kSendUnlocked) {
    future = peer_->call_at_once(peer, function, call.payload, call.timeout, call.lane);
  }
  // Neither a long copy nor another thread's lock may stop the other Python threads.
  if (future == nullptr) {
    future = without_gil([&] {
      return peer_->call(peer, function, std::move(call.payload), call.timeout, call.lane);
    });
  }
  return future_of(std::move(future), peer, function, std::move(call.released));
}

nb::object PyRpc::sync(const std::string& peer, const std::string& function,
                       const nb::args& arguments, const nb::kwargs& keywords) {
  const nb::object future = async(peer, function, arguments, keywords);
  return nb::cast<PyFuture&>(future).result(std::nullopt);
}

void PyRpc::async_callback(const std::string& peer, const std::string& function,
                           nb::callable callback, const nb::args& arguments,
                           const nb::kwargs& keywords) {
  const nb::object started = async(peer, function, arguments, keywords);
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

nb::dict PyRpc::async_many(const std::vector<std::string>& peers, const std::string& function,
                           const nb::args& arguments, const nb::kwargs& keywords) {
  const Outgoing call = outgoing(nullptr, arguments, keywords);
  nb::dict futures;
  for (const std::string& peer : peers) {
    if (futures.contains(peer.c_str())) continue;
    auto future = without_gil([&] {
      // A call to itself decodes the very bytes that are sent to the others.
      wire::Payload own = peer == peer_->name()
                              ? wire::private_copy(call.payload, peer_->context()->pool())
                              : call.payload;
      return peer_->call(peer, function, std::move(own), call.timeout, call.lane);
    });
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
  auto stream = without_gil([&] {
    return peer_->stream(peer, function, std::move(call.payload), call.timeout, call.lane,
                         kStreamCredit);
  });
  return nb::cast(new PyStream(std::move(stream), options_), nb::rv_policy::take_ownership);
}

// --- representation, statistics

std::string PyRpc::repr() const {
  try {
    const std::string named = "<moolink.Rpc '" + peer_->name() + "'";
    if (peer_->closed()) return named + ", closed>";
    const std::vector<rpc::PeerInfo> peers = peer_->peers();
    const auto connected = std::count_if(peers.begin(), peers.end(),
                                         [](const rpc::PeerInfo& info) { return info.connected; });
    return named + places_text(peer_->addresses()) + ", connected to " + std::to_string(connected) +
           (connected == 1 ? " peer>" : " peers>");
  } catch (const Exception&) {  // this process is a forked child
    return "<moolink.Rpc of the parent process>";
  }
}

nb::dict PyRpc::stats() const {
  nb::dict stats = describe(without_gil([this] { return peer_->stats(); }));
  stats["copies"] = options_->copies->describe();
  stats["cuda"] = cuda_info();
  return stats;
}

nb::list PyRpc::peers() const {
  return describe(without_gil([this] { return peer_->peers(); }));
}

nb::dict PyRpc::explain(const std::string& peer) const {
  return describe(without_gil([&] { return peer_->explain(peer); }));
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

}  // namespace moolink::bind
