#include "runtime/peer/rpc_peer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <list>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/barrier.h"
#include "base/enum_names.h"
#include "base/names.h"
#include "device/block.h"
#include "device/devices.h"
#include "rpc/messages.h"
#include "runtime/peer/bounded_wait.h"
#include "runtime/peer/describe.h"
#include "transport/transports.h"

namespace moolink::runtime {
namespace {

constexpr Duration kFinishHandlers = milliseconds(500);
constexpr Duration kDeliver = seconds(1);
constexpr Duration kCloseMargin = milliseconds(500);

constexpr auto kServices = enum_names<rpc::Service::snapshot>(
    "", "directory", "group", "collective", "accumulate", "snapshot");
constexpr auto kHow = enum_names<rpc::Down::closed>("dead", "unreachable", "closed");

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
      authenticator_(options.keyring, options.key_origin, random_seed()),
      node_(node_config(options, *context_), context_->pool(), authenticator_),
      transports_(context_, options, *this, node_),
      functions_(context_) {}

RpcPeer::~RpcPeer() = default;

void RpcPeer::abandon() noexcept {
  transports_.abandon();
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
  if (!connections_.unflushed_are_tcp()) return settle();
  context_->engine().flush_bursts();
  context_->engine().rearm(node_.next_deadline());
}

void RpcPeer::settle(Time deadline) {
  connections_.flush();
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
  transports_.set_name(name);
}

void RpcPeer::set_transports(const std::vector<wire::PathKind>& transports) {
  const Engine::Lock lock = lock_open();
  transports_.choose(transports);
}

std::vector<std::string> RpcPeer::listen(const std::string& address, const std::string& advertise) {
  const std::vector<std::string> addresses = transport::look_up_names(with_scheme(address));
  const Engine::Lock lock = lock_open();
  transports_.start();
  std::vector<std::string> announced = transports_.listen(addresses, advertise);
  operation_done();
  return announced;
}

void RpcPeer::connect(const std::string& address) {
  const Engine::Lock lock = lock_open();
  transports_.start();
  const std::string full = with_scheme(address);
  transports_.serving(full).check(full);
  node_.connect(io::now(), full);
  operation_done();
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
  functions_.define(function, std::move(handler));
  try {
    node_.define(function, group);
  } catch (...) {
    functions_.undefine(function);
    throw;
  }
  operation_done();
}

bool RpcPeer::undefine(const std::string& function, const Engine::Interrupt& interrupt) {
  std::shared_ptr<Functions::Function> entry;  // its handler is destroyed without the lock
  Engine::Lock lock = lock_open();
  entry = functions_.undefine(function);
  if (entry == nullptr) return false;
  node_.undefine(function);
  operation_done();
  functions_.wait_until_drained(lock, *entry, interrupt);
  return true;
}

void RpcPeer::reply(const rpc::CallKey& key, rpc::Reply reply) {
  if (finished_) return;
  const Time now = clock();
  if (Functions::Handling* handling = functions_.find(key); handling != nullptr) {
    const Error* error = std::get_if<Error>(&reply);
    record(FlightKind::reply, handling->caller, key.id, error ? error->message : "");
    functions_.replied(key, *handling);
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

// --- statistics

RpcStats RpcPeer::stats() {
  const Engine::Lock lock = context_->lock();
  RpcStats stats = stats_;
  stats.calls_received = functions_.received();
  stats.calls_running = functions_.running();
  stats.connections = connections_.all().size();
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

// --- reports

void RpcPeer::describe(Time now, Describe how, std::string& text) const {
  const std::string who = "peer '" + node_.name() + "'";
  if (how == Describe::waits) {
    describe_calls(node_, now, kMostWaits, who + ": ", text);
    functions_.describe(now, kMostWaits, who + ": ", text);
    return;
  }
  text += who + " (" + node_.instance().hex() + ")" + (closing_ ? ", closing" : "") + "\n";
  text += "  reached at:";
  for (const std::string& address : node_.addresses()) text += " " + address;
  text += node_.addresses().empty() ? " nowhere (it neither listens nor is connected)\n" : "\n";
  if (const std::string why = why_none_connects(now); !why.empty()) text += "  " + why + "\n";
  describe_peers(node_, now, text);
  describe_calls(node_, now, kMostLines, "  ", text);
  functions_.describe(now, kMostLines, "  ", text);
}

std::vector<std::string> RpcPeer::flight_recorder() {
  const Engine::Lock lock = context_->lock();
  std::vector<std::string> lines;
  const Time now = io::now();
  for (const FlightEvent& event :
       context_->recorder().last(FlightRecorder::kEvents, node_.name())) {
    lines.push_back(line_of(event, now));
  }
  return lines;
}

rpc::Explanation RpcPeer::explain(const std::string& peer) {
  const Engine::Lock lock = context_->lock();
  return node_.explain(io::now(), peer);
}

// --- events of transports

// Calls every observer, each behind the exception barrier.
template <class... Values>
void RpcPeer::tell_observers(void (PeerObserver::*what)(const Values&...),
                             const Values&... values) {
  for (std::size_t i = 0; i < observers_.size(); ++i) {
    PeerObserver& observer = *observers_[i];
    guard([&]() MOOLINK_LOCKED { (observer.*what)(values...); },
          [&](const Error& error) MOOLINK_LOCKED { observer.failed(error); });
  }
}

void RpcPeer::opened(std::shared_ptr<transport::Connection> connection,
                     const std::string& dialled_address) {
  transport::Connection& opened = *connection;
  connections_.add(std::move(connection));
  if (!dialled_address.empty()) transports_.listen_beside(opened);
  ++stats_.connections_opened;
  const Time now = clock();
  record(FlightKind::opened, "", opened.id(), opened.peer_address());
  node_.opened(now, opened.id(), opened.path(), opened.traits(), dialled_address);
  carry_out();
}

void RpcPeer::closed(transport::Connection& connection, const Error& error, bool peer_dead) {
  const Uid instance = node_.instance_of(connection.id());
  const Time now = clock();
  record(FlightKind::closed, "", connection.id(), error.message);
  forget(connection.id(), instance);
  node_.closed(now, connection.id(), error);
  if (peer_dead && instance) node_.peer_dead(io::now(), instance);
  carry_out();
}

void RpcPeer::dial_failed(const std::string& address, const Error& error) {
  ++stats_.dials_failed;
  const Time now = clock();
  record(FlightKind::dial_failed, "", 0, error.message);
  node_.dial_failed(now, address, error);
  carry_out();
}

void RpcPeer::turned_away(const Error& error) {
  const Time now = clock();
  record(FlightKind::closed, "", 0, error.message);
  node_.turned_away(now, error);
  carry_out();
}

void RpcPeer::cannot_accept(const Error& error) {
  const Time now = clock();
  transports_.cannot_accept(now, error);
  node_.cannot_accept(now, error);
  carry_out();
}

// Control frames of a session; data frames would fill the recorder.
void RpcPeer::record_frame(FlightKind kind, wire::ConnectionId connection, wire::FrameType type) {
  switch (type) {
    case wire::FrameType::hello:
    case wire::FrameType::welcome:
    case wire::FrameType::refuse:
    case wire::FrameType::window:
    case wire::FrameType::close:
      return record(kind, "", connection, wire::kFrameTypes[type]);
    default:
      return;
  }
}

void RpcPeer::received(transport::Connection& connection, wire::ReceivedFrame frame) {
  PathStats& path = stats_.paths[static_cast<std::size_t>(connection.path())];
  ++path.frames_received;
  path.bytes_received += frame.bytes.size();
  const Time now = clock();
  record_frame(FlightKind::received, connection.id(), frame.header.type);
  node_.received(now, connection.id(), frame);
  carry_out();
}

std::span<std::byte> RpcPeer::chunk_target(transport::Connection& connection,
                                           const wire::ChunkHead& head) {
  const auto target = node_.chunk_target(connection.id(), head);
  carry_out();
  return target;
}

void RpcPeer::chunk_received(transport::Connection& connection, const wire::ChunkHead& head) {
  PathStats& path = stats_.paths[static_cast<std::size_t>(connection.path())];
  ++path.frames_received;
  path.bytes_received += head.bytes;
  node_.event(&session::Session::chunk_received, clock(), connection.id(), head);
  carry_out();
}

void RpcPeer::writable(transport::Connection& connection) {
  node_.event(&session::Session::writable, io::now(), connection.id());
  carry_out();
}

void RpcPeer::grant_filled(transport::Connection& connection, const wire::GrantPlace& place) {
  stats_.paths[static_cast<std::size_t>(connection.path())].bytes_written += place.bytes;
  node_.event(&session::Session::grant_filled, io::now(), connection.id(), place.grant);
  carry_out();
}

bool RpcPeer::share(const Uid& instance, const Uid& key, std::span<const int> descriptors) {
  transport::Connection* connection = in_use(instance);
  return connection != nullptr && connection->share(key, descriptors);
}

bool RpcPeer::lends(const Uid& instance, const std::string& peer, std::uint64_t segment,
                    const std::string& group) {
  transport::Connection* connection = in_use(instance);
  if (connection != nullptr) {
    return connection->pass_segment(segment) && connection->is_mapped(segment);
  }
  send_service_to(instance, peer, rpc::Service::directory,
                  {wire::encode(rpc::DirectoryMessage{}), {}}, group);
  return false;
}

LentBytes RpcPeer::lent_by(const Uid& instance, std::uint64_t segment) {
  transport::Connection* connection = in_use(instance);
  LentBytes bytes = connection == nullptr ? nullptr : connection->lent_bytes(segment);
  const auto& all = connections_.all();
  for (auto other = all.begin(); bytes == nullptr && other != all.end(); ++other) {
    if (node_.instance_of(other->first) == instance) bytes = other->second->lent_bytes(segment);
  }
  return bytes;
}

// --- actions of the Node

void RpcPeer::carry_out() {
  const auto take = [this]() MOOLINK_LOCKED -> std::vector<rpc::Action>& {
    connections_.report_room([this](wire::ConnectionId id) MOOLINK_LOCKED {
      node_.event(&session::Session::writable, io::now(), id);
    });
    node_.drain(actions_);
    return actions_;
  };
  pump_.run(
      take, [this](auto& action) MOOLINK_LOCKED { perform(action); },
      [this](const auto& action, const Error& error) MOOLINK_LOCKED {
        if constexpr (requires { action.connection; }) {
          refuse_path(action.connection, error);  // lost frames go over the next one
        } else if constexpr (requires { this->end(action, error); }) {
          end(action, error);
        } else {
          context_->log(LogLevel::error,
                        "peer '" + node_.name() + "' went on after an error: " + error.message);
        }
      });
}

transport::Connection* RpcPeer::in_use(const rpc::Receiver& receiver) {
  const session::Session* session = node_.session_with(receiver);
  const auto id = session == nullptr ? std::nullopt : session->connection_in_use(io::now());
  return id ? connections_.find(*id) : nullptr;
}

// False: CUDA does not provide the bytes, so no path can carry them, and the session has ended.
bool RpcPeer::can_bring_to_host(wire::ConnectionId connection, std::span<Buffer> parts) {
  try {
    device::bring_to_host(parts, context_->pool());
    return true;
  } catch (const Exception& e) {
    node_.fail_peer(io::now(), node_.instance_of(connection), e.error());
    return false;
  }
}

void RpcPeer::perform(rpc::Write& action) {
  const auto* connection = connections_.find_shared(action.connection);
  if (connection == nullptr) return;
  if (!can_bring_to_host(action.connection, action.frame.payload)) return;
  PathStats& path = stats_.paths[static_cast<std::size_t>((*connection)->path())];
  ++path.frames_written;
  path.bytes_written += action.frame.bytes();
  record_frame(FlightKind::sent, action.connection, action.frame.header.type);
  connections_.write(*connection, std::move(action.frame));
}

void RpcPeer::perform(rpc::RunHandler& action) {
  // Its first use was cancelled and has not returned; its late reply must not answer this call.
  if (functions_.find(action.key) != nullptr) {
    return node_.reply(io::now(), action.key,
                       make_error(ErrorCode::wire, "the number of a call was used twice"));
  }
  record(FlightKind::handler, action.caller, action.key.id, action.function);
  functions_.start(shared_from_this(), action, now_);
}

void RpcPeer::perform(rpc::Complete& action) {
  const bool failed = std::holds_alternative<Error>(action.result);
  ++(failed ? stats_.calls_failed : stats_.calls_succeeded);
  const Error* error = std::get_if<Error>(&action.result);
  record(FlightKind::result, error ? error->peer : "", action.id, error ? error->message : "");
  const auto pending = pending_.extract(action.id);
  if (pending.empty()) return;
  Awaitable& outcome = *pending.mapped().outcome;
  if (error && error->code == ErrorCode::timeout) {
    guard([&]() MOOLINK_LOCKED { outcome.set_detail(context_->who_waited(now_)); },
          [](const Error&) {});
  }
  outcome.complete(std::move(action.result));
}

void RpcPeer::perform(rpc::StreamItem& action) {
  const auto pending = pending_.find(action.id);
  if (pending != pending_.end()) pending->second.items->add(std::move(action.item));
}

void RpcPeer::perform(rpc::CreditRaised& action) {
  Functions::Handling* handling = functions_.find(action.key);
  if (handling == nullptr) return;
  if (const auto responder = handling->responder.lock()) responder->raise_credit(action.allowed);
}

void RpcPeer::perform(rpc::ServiceMessage& action) {
  for (const Buffer& part : action.payload.parts) {
    if (device::block_of(part) != nullptr) wire::fail("a service's message in a device's memory");
  }
  record(FlightKind::service, action.from_name, static_cast<std::uint64_t>(action.service),
         kServices[action.service]);
  router_.dispatch(action.service, action.from, action.from_name, action.payload);
}

void RpcPeer::perform(rpc::CancelHandler& action) {
  Functions::Handling* handling = functions_.find(action.key);
  if (handling == nullptr) return;
  record(FlightKind::stop, handling->caller, action.key.id, "");
  functions_.cancel(action.key, *handling);
}

void RpcPeer::perform(rpc::Dial& action) {
  record(FlightKind::dial, "", 0, action.address);
  transports_.serving(action.address).dial(action.address);
}

void RpcPeer::perform(rpc::CloseConnection& action) {
  record(FlightKind::closed, "", action.connection, action.error.message);
  if (const auto connection = forget(action.connection, action.peer)) connection->close();
}

std::shared_ptr<transport::Connection> RpcPeer::forget(wire::ConnectionId id, const Uid& instance) {
  auto connection = connections_.remove(id);
  if (connection != nullptr) {
    tell_observers(&PeerObserver::connection_ended, instance, connection);
  }
  return connection;
}

void RpcPeer::perform(rpc::AllocateGrant& action) {
  transport::Grant grant;  // empty: there is none
  if (transport::Connection* connection = connections_.find(action.connection)) {
    grant = connection->allocate_grant(action.bytes).value_or(transport::Grant{});
  }
  node_.event(&session::Session::grant_ready, io::now(), action.connection, action.seq, action.part,
              grant.place, std::move(grant.memory));
}

void RpcPeer::perform(rpc::FillGrant& action) {
  transport::Connection* connection = connections_.find(action.connection);
  if (connection == nullptr) return;
  if (device::block_of(action.bytes) != nullptr) {
    const std::string refusal = connection->refusal_of(action.bytes);
    if (!refusal.empty()) {
      if (!std::exchange(told_refusal_, true)) {
        context_->log(LogLevel::info,
                      "arrays on CUDA devices go through the host's memory: " + refusal);
      }
      if (!can_bring_to_host(action.connection, {&action.bytes, 1})) return;
    }
  }
  connection->fill_grant(action.place, std::move(action.bytes));
}

bool RpcPeer::reads_device(const rpc::Receiver& receiver, int device) {
  device::Devices::process().sharing_refusal(device);  // tries it, which is too long for the lock
  const Engine::Lock lock = context_->lock();
  const transport::Connection* connection = in_use(receiver);
  return connection != nullptr && connection->reads_device(device);
}

// Keeps the memory mapped, and releases the grant that no message has named.
struct RpcPeer::HeldGrant : wire::StandingGrant {
  HeldGrant(const std::weak_ptr<RpcPeer>& peer, MutableBuffer memory,
            const wire::StandingGrant& standing)
      : wire::StandingGrant(standing),
        owner(peer),
        mapped(std::move(memory)),
        release(io::Loop::prepare([peer, id = connection, number = grant]() MOOLINK_LOCKED {
          if (const auto alive = peer.lock()) alive->release(id, number);
        })) {}
  // Runs on any thread, and in a forked child, which must not release its parent's grants.
  ~HeldGrant() {
    const auto peer = named ? nullptr : owner.lock();
    if (peer == nullptr || peer->context()->abandoned() || peer->closed()) return;
    peer->context()->engine().loop().post(std::move(release));
  }
  HeldGrant(const HeldGrant&) = delete;
  HeldGrant& operator=(const HeldGrant&) = delete;

  std::weak_ptr<RpcPeer> owner;
  MutableBuffer mapped;
  io::Loop::Prepared release;
};

std::optional<PlacedMemory> RpcPeer::place(const rpc::Receiver& receiver, std::size_t bytes) {
  const Engine::Lock lock = context_->lock();
  session::Session* session = node_.session_with(receiver);
  const auto standing =
      session == nullptr ? std::nullopt : session->take_preposted(io::now(), bytes);
  if (!standing) return std::nullopt;
  transport::Connection* connection = connections_.find(standing->connection);
  if (connection == nullptr) return std::nullopt;
  try {
    const MutableBuffer memory = connection->grant_memory(standing->place);
    if (memory.empty()) return std::nullopt;  // the connection is ending
    stats_.paths[static_cast<std::size_t>(connection->path())].bytes_written += bytes;
    const wire::StandingGrant grant{standing->connection, standing->place.grant};
    const std::shared_ptr<wire::StandingGrant> held =
        std::make_shared<HeldGrant>(weak_from_this(), memory, grant);
    return PlacedMemory{{held, memory.data(), bytes}, held};
  } catch (...) {
    refuse_path(standing->connection, current_error());
    operation_done();
    return std::nullopt;
  }
}

void RpcPeer::release(wire::ConnectionId connection, std::uint64_t grant) {
  if (finished_) return;
  node_.event(&session::Session::release_preposted, io::now(), connection, grant);
  operation_done();
}

void RpcPeer::perform(rpc::PassSegments& action) {
  transport::Connection* connection = connections_.find(action.connection);
  const bool passed =
      connection != nullptr &&
      std::ranges::all_of(action.segments, [&](std::uint64_t segment) MOOLINK_LOCKED {
        return connection->pass_segment(segment);
      });
  node_.event(&session::Session::segments_passed, io::now(), action.connection, action.seq, passed);
}

void RpcPeer::perform(rpc::MapLoan& action) {
  transport::Connection* connection = connections_.find(action.connection);
  if (connection == nullptr) return;  // the Node gets its end or has
  Buffer bytes;
  Error error;
  guard(
      [&]() MOOLINK_LOCKED {
        const Uid lender = node_.instance_of(action.connection);
        bytes = returns_->borrow(connection->map_loan(action.place),
                                 {lender, action.session, action.place.loan});
      },
      [&](const Error& why) { error = why; });
  node_.event(&session::Session::loan_mapped, io::now(), action.connection, action.seq, action.part,
              std::move(bytes), error);
}

void RpcPeer::return_loans() {
  if (finished_) return;
  // Without an allocation, whose failure would lose loans.
  std::list<LoanReturns::Ended> ended = returns_->take();
  ended.sort([](const LoanReturns::Ended& a, const LoanReturns::Ended& b) {
    return std::tie(a.lender, a.session) < std::tie(b.lender, b.session);
  });
  std::array<std::uint64_t, 256> loans;
  while (!ended.empty()) {
    const LoanReturns::Ended first = ended.front();
    std::size_t count = 0;
    while (count < loans.size() && !ended.empty() && ended.front().lender == first.lender &&
           ended.front().session == first.session) {
      loans[count++] = ended.front().loan;
      ended.pop_front();
    }
    node_.return_loans(io::now(), first.lender, first.session, std::span(loans.data(), count));
  }
  operation_done();
}

void RpcPeer::perform(rpc::PeerUp& action) {
  record(FlightKind::peer_up, action.name, 0, action.same_host ? "same host" : "another host");
  tell_observers(&PeerObserver::peer_up, action);
}

void RpcPeer::perform(rpc::Undelivered& action) {
  tell_observers(&PeerObserver::undelivered, action.instance);
}

void RpcPeer::perform(rpc::Refused& action) { tell_observers(&PeerObserver::refused, action); }

void RpcPeer::perform(rpc::PeerDown& action) {
  record(FlightKind::peer_down, action.name, 0, kHow[action.how]);
  ++stats_.peers_lost;
  tell_observers(&PeerObserver::peer_down, action);
}

// --- of actions that failed

void RpcPeer::end(const rpc::RunHandler& action, const Error& error) {
  node_.reply(io::now(), action.key,
              Error{.code = ErrorCode::error,
                    .message = "peer '" + node_.name() + "' cannot run the call: " + error.message,
                    .peer = node_.name()});
}

void RpcPeer::end(const rpc::StreamItem& action, const Error& error) {
  const auto pending = pending_.extract(action.id);
  if (!pending.empty()) pending.mapped().outcome->complete(error);
  node_.cancel(io::now(), action.id);
}

// The peer has reported something impossible about its memory.
void RpcPeer::refuse_path(wire::ConnectionId id, const Error& error) {
  const auto connection = forget(id, node_.instance_of(id));
  node_.closed(io::now(), id, error);
  if (connection != nullptr) connection->close();
}

// --- of the peer

// Each step behind the barrier: whatever fails, the peer is closed when this returns.
void RpcPeer::close() {
  if (context_->abandoned() || closing_.exchange(true)) return;
  const auto ignore = [](const Error&) {};
  std::vector<std::unique_ptr<transport::Transport>> stopped;  // destroyed without the lock
  Engine::Lock lock = context_->lock();
  functions_.wait_until_idle(lock, kFinishHandlers);
  guard(
      [&]() MOOLINK_LOCKED {
        wait_until_delivered(lock, [this]() MOOLINK_LOCKED {
          return std::ranges::all_of(observers_, &PeerObserver::has_delivered);
        });
      },
      ignore);
  for (std::size_t i = observers_.size(); i-- > 0;) {  // they may remove themselves
    guard([&]() MOOLINK_LOCKED { observers_[i]->closing(); }, ignore);
  }
  wait_within(*context_, lock, node_closed_, "close(): replies to be sent",
              rpc::Config{}.close_within + kCloseMargin, [&]() MOOLINK_LOCKED {
                node_.close(io::now());
                operation_done();
              });
  finished_ = true;
  stopped = transports_.stop();
  connections_.clear();
  driven_.reset();
  forks_.reset();
  fail_pending();
  functions_.fail_all();
  observers_.clear();
}

void RpcPeer::fail_pending() {
  const auto fail = [this](Awaitable& awaited) {
    const auto say = [&]() MOOLINK_LOCKED {
      awaited.complete(Error{.code = ErrorCode::closed,
                             .message = "the peer '" + node_.name() + "' was closed",
                             .peer = node_.name(),
                             .ran = Ran::maybe});
    };
    guard(say, [&](const Error& error) MOOLINK_LOCKED {
      awaited.complete(make_error(ErrorCode::closed, error.message));
    });
  };
  for (auto& [id, pending] : std::exchange(pending_, {})) fail(*pending.outcome);
}

void RpcPeer::wait_until_delivered(Engine::Lock& lock, const std::function<bool()>& delivered) {
  const Time deadline = io::now() + kDeliver;
  for (Time now = io::now(); now < deadline && !delivered(); now = io::now()) {
    Waiter moment;  // no event tells when the last peer has taken the data in a shared segment
    moment.what = "close(): data on its way to other members";
    context_->wait(lock, moment, now + milliseconds(1), {});
  }
}

}  // namespace moolink::runtime
