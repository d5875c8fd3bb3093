#include "runtime/peer/rpc_peer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <utility>

#include "base/barrier.h"
#include "base/environment_variable.h"
#include "base/names.h"
#include "base/scoped.h"
#include "transport/transports.h"

namespace moolink::runtime {
namespace {

// The handlers that run on this thread, the innermost first.
class Frame {
 public:
  Frame(const RpcPeer& peer, const void* function) : peer_(peer), function_(function) {
    innermost = this;
  }
  ~Frame() { innermost = outer_; }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  static bool innermost_is_of(const RpcPeer& peer) {
    return innermost != nullptr && &innermost->peer_ == &peer;
  }
  static bool any_is_of(const void* function) {
    for (const Frame* frame = innermost; frame != nullptr; frame = frame->outer_) {
      if (frame->function_ == function) return true;
    }
    return false;
  }

 private:
  inline static thread_local const Frame* innermost = nullptr;

  const RpcPeer& peer_;
  const void* const function_;
  const Frame* const outer_ = innermost;
};

crypto::Digest random_seed() {
  const std::array words{entropy64(), entropy64(), entropy64(), entropy64()};
  return std::bit_cast<crypto::Digest>(words);
}

rpc::Config node_config(const RpcOptions& options, const Context& context) {
  rpc::Config config;
  config.instance = Uid::from_entropy();
  config.name = options.name.empty() ? config.instance.hex() : options.name;
  check_name("a peer's name", config.name);
  config.host_key = context.host_key();
  config.limits = options.limits;
  config.timing = options.timing;
  if (options.transports) config.paths = *options.transports;
  return config;
}

// moolib's "ipc://<name>" is the socket of that name on this host.
std::string with_scheme(const std::string& address) {
  constexpr std::string_view kIpc = "ipc://";
  if (address.starts_with(kIpc)) {
    std::string name = address.substr(kIpc.size());
    if (name.empty()) {
      throw Exception(ErrorCode::invalid_argument,
                      "malformed address '" + address + "': it has no name (ipc://<name>)");
    }
    std::ranges::replace(name, '/', '%');  // paths are common as names
    return "shm:///moolink.ipc." + name;
  }
  return address.find("://") == std::string::npos ? "tcp://" + address : address;
}

}  // namespace

bool RpcPeer::runs_handler_here() const { return Frame::innermost_is_of(*this); }

// --- life

std::shared_ptr<RpcPeer> RpcPeer::create(std::shared_ptr<Context> context, RpcOptions options) {
  const Engine::Lock lock = context->lock();
  std::shared_ptr<RpcPeer> peer(new RpcPeer(context, std::move(options)));
  peer->returns_ =
      std::make_shared<LoanReturns>(context, [weak = std::weak_ptr(peer)]() MOOLINK_LOCKED {
        if (const auto alive = weak.lock()) alive->return_loans();
      });
  peer->driven_ = context->engine().add(*peer);
  peer->forks_ = context->add(*peer);
  return peer;
}

RpcPeer::RpcPeer(std::shared_ptr<Context> context, RpcOptions options)
    : context_(std::move(context)),
      chosen_(options.transports),
      authenticator_(options.keyring, options.key_origin, random_seed()),
      environment_{context_->engine().loop(),
                   context_->pool(),
                   *this,
                   options.limits,
                   context_->host_key(),
                   environment_variable("MOOLINK_INTERFACE")},
      node_(node_config(options, *context_), context_->pool(), authenticator_) {
  environment_.lending = &context_->lending();
  environment_.keyring = options.keyring;
  environment_.name = node_.name();
  environment_.tls_thread = switch_variable("MOOLINK_TLS_THREAD");
  environment_.streams.most =
      static_cast<std::size_t>(number_variable("MOOLINK_TCP_STREAMS", 4, 0, 16));
}

RpcPeer::~RpcPeer() = default;

void RpcPeer::abandon() noexcept {
  for (const auto& transport : transports_) transport->abandon();
  descriptors_.abandon();
  new std::shared_ptr<RpcPeer>(shared_from_this());
}

Engine::Lock RpcPeer::lock_open() MOOLINK_UNCHECKED {
  Engine::Lock lock = context_->lock();
  if (closing_) throw Exception(ErrorCode::closed, "the peer '" + node_.name() + "' was closed");
  return lock;
}

// The end of an operation from outside the loop.
void RpcPeer::operation_done() {
  carry_out();
  settle();
}

// A call or a reply was written: one system call carries a whole burst of them. A doorbell of
// shared memory rings at once: that costs less than deferring it.
void RpcPeer::call_done() {
  carry_out();
  const bool by_socket = std::ranges::all_of(
      dirty_, [](const auto& connection) { return connection->path() == wire::PathKind::tcp; });
  if (!by_socket) return settle();
  context_->engine().flush_bursts();
  context_->engine().rearm(node_.next_deadline());
}

void RpcPeer::settle(Time deadline) {
  flush();
  context_->engine().rearm(std::min(deadline, node_.next_deadline()));
}

// --- names, addresses

std::string RpcPeer::name() {
  const Engine::Lock lock = context_->lock();
  return node_.name();
}

void RpcPeer::set_name(const std::string& name) {
  const Engine::Lock lock = lock_open();
  node_.set_name(name);
  environment_.name = name;
}

void RpcPeer::set_transports(const std::vector<wire::PathKind>& transports) {
  const Engine::Lock lock = lock_open();
  if (started_) {
    throw Exception(ErrorCode::invalid_argument,
                    "transports are chosen before the first listen or connect");
  }
  chosen_ = transports;
  node_.set_paths(transports);
}

// The first listen or connect: from now on peers of this host can reach this one.
void RpcPeer::start() {
  if (started_) return;
  auto [made, kinds, lacking, warning] = transport::make_transports(environment_, chosen_);
  if (!warning.empty()) context_->log(LogLevel::warning, std::move(warning));
  transports_ = std::move(made);
  node_.set_paths(kinds, std::move(lacking));
  started_ = true;
  if (std::ranges::count(kinds, wire::PathKind::shm) != 0) listen_unasked("shm://");
}

std::vector<std::string> RpcPeer::listen(const std::string& address, const std::string& advertise) {
  const std::vector<std::string> addresses = transport::look_up_names(with_scheme(address));
  const Engine::Lock lock = lock_open();
  start();
  std::vector<std::string> announced = listen_at(addresses, advertise);
  operation_done();
  return announced;
}

void RpcPeer::connect(const std::string& address) {
  const Engine::Lock lock = lock_open();
  start();
  const std::string full = with_scheme(address);
  transport_for(full).check(full);
  node_.connect(io::now(), full);
  operation_done();
}

transport::Transport& RpcPeer::transport_for(const std::string& address) {
  for (const auto& transport : transports_) {
    if (transport->accepts(address)) return *transport;
  }
  throw Exception(ErrorCode::invalid_argument,
                  "no enabled transport serves the address '" + address + "'");
}

// --- calls

std::shared_ptr<Future> RpcPeer::start_call(const std::string& peer, const std::string& function,
                                            wire::Payload arguments, Duration timeout,
                                            std::uint16_t lane) {
  auto future = std::make_shared<Future>(context_);
  const rpc::CallId id = node_.call(clock(), peer, function, std::move(arguments), timeout, lane);
  follow(id, peer, function, {future});
  call_done();
  return future;
}

std::shared_ptr<Stream> RpcPeer::stream(const std::string& peer, const std::string& function,
                                        wire::Payload arguments, Duration timeout,
                                        std::uint16_t lane, std::uint64_t credit) {
  auto stream = std::make_shared<Stream>(context_, credit);
  const Engine::Lock lock = lock_open();
  const rpc::CallId id =
      node_.call(clock(), peer, function, std::move(arguments), timeout, lane, credit);
  follow(id, peer, function, {stream, stream.get()});
  stream->on_room([this, id](std::uint64_t more) MOOLINK_LOCKED {
    node_.raise_credit(io::now(), id, more);
    operation_done();
  });
  operation_done();
  return stream;
}

// A call has begun, which `pending` gets the items and the result of.
void RpcPeer::follow(rpc::CallId id, const std::string& peer, const std::string& function,
                     Pending pending) {
  ++stats_.calls_sent;
  record(FlightKind::call, peer, id, function);
  pending.outcome->set_subject(pending.items == nullptr ? "call" : "stream", id);
  try {
    pending.outcome->on_cancel([this, id]() MOOLINK_LOCKED {
      node_.cancel(io::now(), id);
      operation_done();
    });
    pending_.emplace(id, std::move(pending));
  } catch (...) {
    node_.cancel(io::now(), id);  // its outcome could not be reported
    operation_done();
    throw;
  }
}

void RpcPeer::define(const std::string& function, CallHandler handler, const std::string& group) {
  const Engine::Lock lock = lock_open();
  auto entry = std::make_shared<Function>();
  entry->handler = std::move(handler);
  const auto [defined, is_new] = functions_.emplace(function, std::move(entry));
  if (!is_new) {
    throw Exception(ErrorCode::invalid_argument,
                    "function '" + function + "' is defined already; undefine it first");
  }
  try {
    node_.define(function, group);
  } catch (...) {
    functions_.erase(defined);
    throw;
  }
  operation_done();
}

bool RpcPeer::undefine(const std::string& function, const Engine::Interrupt& interrupt) {
  std::shared_ptr<Function> entry;  // its handler is destroyed without the lock
  Engine::Lock lock = lock_open();
  const auto found = functions_.find(function);
  if (found == functions_.end()) return false;
  entry = found->second;
  functions_.erase(found);
  node_.undefine(function);
  operation_done();
  if (entry->running == 0 || Frame::any_is_of(entry.get())) return true;
  Waiter drained;
  drained.what = "undefine(): handlers that run";
  const Listed listed(entry->drained, drained);
  context_->wait(lock, drained, kNever, interrupt);
  return true;
}

void RpcPeer::reply(const rpc::CallKey& key, rpc::Reply reply) {
  if (finished_) return;
  const Time now = clock();
  const auto handling = running_.find(key);
  if (handling != running_.end()) {
    const Error* error = std::get_if<Error>(&reply);
    record(FlightKind::reply, handling->second.caller, key.id, error ? error->message : "");
    handling->second.replied = true;
    forget_if_over(handling);
  }
  node_.reply(now, key, std::move(reply));
  // A worker flushes when it has nothing more to run; other threads may not.
  Workers::on_worker_thread() ? call_done() : operation_done();
}

void RpcPeer::dropped(const rpc::CallKey& key, const std::string& function) {
  const std::string& name = node_.name();
  reply(key, Error{.code = ErrorCode::remote,
                   .message = "the handler of '" + function + "' at peer '" + name +
                              "' dropped the call without a reply",
                   .peer = name,
                   .function = function,
                   .remote_type = "RuntimeError",
                   .ran = Ran::yes});
}

void RpcPeer::send_item(const rpc::CallKey& key, wire::Payload item) {
  const Engine::Lock lock = context_->lock();
  if (finished_) return;
  node_.send_item(io::now(), key, std::move(item));
  operation_done();
}

void RpcPeer::forget_if_over(HandlingOf::iterator handling) {
  const Handling& entry = handling->second;
  if (entry.returned && (entry.replied || entry.unwanted)) running_.erase(handling);
}

// Whether the call waits until its caller takes results again: then it runs anew.
bool RpcPeer::hold_back(const std::shared_ptr<Function>& function, const Incoming& incoming) {
  Tasks again;  // destroyed without the lock
  again.push_back([self = shared_from_this(), function, incoming = incoming]() mutable {
    self->run(function, std::move(incoming));
  });
  const rpc::CallKey& key = incoming.responder->key();
  const Engine::Lock lock = context_->lock();
  const auto handling = running_.find(key);
  if (handling == running_.end() || handling->second.unwanted) return false;
  if (!held_callers_.contains(key.caller)) return false;
  handling->second.held = std::move(again);
  return true;
}

// On a worker.
void RpcPeer::run(const std::shared_ptr<Function>& function, Incoming incoming) {
  if (holds_handlers_) {
    bool held = false;
    guard([&] { held = hold_back(function, incoming); }, [](const Error&) {});
    if (held) return;
  }
  const std::shared_ptr<Responder> responder = incoming.responder;
  try {
    const Frame frame(*this, function.get());
    const Time now = io::now();
    responder->begin(now, Engine::this_thread());
    if (now >= incoming.deadline) {
      responder->send(
          Error{.code = ErrorCode::timeout,
                .message = "the call of '" + responder->function() +
                           "' waited for its handler until its time was up; it was not run",
                .function = responder->function()});
    } else if (auto arguments = responder->take_arguments(); arguments) {
      incoming.arguments = std::move(*arguments);
      function->handler(std::move(incoming));
    }
  } catch (const std::exception&) {
    const auto fail = [&] {
      responder->send(Error{.code = ErrorCode::remote,
                            .message = current_error().message,
                            .function = responder->function(),
                            .remote_type = "RuntimeError",
                            .ran = Ran::yes});
    };
    guard(fail, [](const Error&) {});  // it replies when it is dropped
  }
  const Engine::Lock lock = context_->lock();
  if (const auto handling = running_.find(responder->key()); handling != running_.end()) {
    handling->second.returned = true;
    forget_if_over(handling);
  }
  if (--function->running == 0) {
    for (Waiter* waiter : function->drained) context_->engine().finish(*waiter);
  }
  if (--stats_.calls_running == idle_at_ && idle_ != nullptr) context_->engine().finish(*idle_);
}

// --- statistics

RpcStats RpcPeer::stats() {
  const Engine::Lock lock = context_->lock();
  RpcStats stats = stats_;
  stats.connections = connections_.size();
  stats.calls_pending = pending_.size();
  stats.peers = node_.peers(io::now()).size();
  return stats;
}

std::vector<rpc::PeerInfo> RpcPeer::peers() {
  const Engine::Lock lock = context_->lock();
  return node_.peers(io::now());
}

std::vector<std::string> RpcPeer::addresses() {
  const Engine::Lock lock = context_->lock();
  return node_.addresses();
}

// --- services

void RpcPeer::send_service_to(const Uid& instance, const std::string& peer, rpc::Service service,
                              wire::Payload payload, const std::string& group) {
  if (finished_) return;
  node_.send_service_to(io::now(), instance, peer, service, std::move(payload), group);
  carry_out();
}

void RpcPeer::fail_peer(const Uid& instance, const Error& error) {
  if (finished_) return;
  node_.fail_peer(io::now(), instance, error);
  carry_out();
}

void RpcPeer::tick(Time now) {
  node_.tick(now_ = now);
  carry_out();
}

void RpcPeer::flush() {
  for (const auto& connection : std::exchange(dirty_, {})) connection->flush();
}

}  // namespace moolink::runtime
