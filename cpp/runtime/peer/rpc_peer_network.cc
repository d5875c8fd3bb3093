// The transports' events for the Node, and the Node's actions.

#include <algorithm>
#include <array>
#include <list>
#include <map>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/barrier.h"
#include "base/enum_names.h"
#include "device/block.h"
#include "device/devices.h"
#include "rpc/addresses.h"
#include "rpc/messages.h"
#include "runtime/peer/rpc_peer.h"

namespace moolink::runtime {

namespace {

constexpr auto kServices = enum_names<rpc::Service::snapshot>(
    "", "directory", "group", "collective", "accumulate", "snapshot");
constexpr auto kHow = enum_names<rpc::Down::closed>("dead", "unreachable", "closed");

}  // namespace

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
  connections_.emplace(opened.id(), std::move(connection));
  if (!dialled_address.empty()) listen_beside(opened);
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
  // The listener tries again several times a second while a connection waits.
  not_accepted_ = error.message;
  not_accepted_until_ = now + seconds(1);
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
  for (auto other = connections_.begin(); bytes == nullptr && other != connections_.end();
       ++other) {
    if (node_.instance_of(other->first) == instance) bytes = other->second->lent_bytes(segment);
  }
  return bytes;
}

// A peer that connects can be dialled too, on the interface that it connected from: others learn
// the address from the peer it connected to.
void RpcPeer::listen_beside(const transport::Connection& connection) {
  std::string address = connection.local_address();
  // Others must use the chosen interfaces, whichever this connection used.
  if (!address.empty() && !environment_.interface.empty()) {
    address = std::string(wire::kPathNames[connection.path()]) + "://*:0";
  }
  if (!address.empty() && !listens_.contains(connection.path())) listen_unasked(address);
}

std::vector<std::string> RpcPeer::listen_at(const std::vector<std::string>& addresses,
                                            const std::string& advertise) {
  transport::Transport& transport = transport_for(addresses.front());
  // Refuses before it binds anything.
  if (!advertise.empty()) transport.announced(advertise, {"tcp://*:1"});
  std::vector<std::string> bound;
  Error failed;
  for (const std::string& address : addresses) {
    // Of another family it would get another port.
    if (!bound.empty() && address.ends_with(":0")) break;
    guard(
        [&]() MOOLINK_LOCKED {
          for (std::string& one : transport.listen(address)) bound.push_back(std::move(one));
        },
        [&](const Error& error) { failed = error; });
  }
  if (bound.empty()) throw Exception(failed);
  std::vector<std::string> announced =
      advertise.empty() ? bound : transport.announced(advertise, bound);
  listens_.insert(transport.kind());
  node_.listening(announced);
  listen_beside(bound);
  return announced;
}

void RpcPeer::listen_unasked(const std::string& address) {
  guard([&]() MOOLINK_LOCKED { listen_at({address}, {}); },
        [this](const Error& error) MOOLINK_LOCKED {
          context_->log(LogLevel::warning, "others cannot dial this peer: " + error.message);
        });
}

// Starts the listeners that other transports need beside one that is bound to these addresses.
void RpcPeer::listen_beside(const std::vector<std::string>& bound) {
  for (const auto& transport : transports_) {
    const std::string address = transport->beside(bound);
    if (!address.empty() && !listens_.contains(transport->kind())) listen_unasked(address);
  }
}

// --- actions of the Node

void RpcPeer::carry_out() {
  const auto take = [this]() MOOLINK_LOCKED -> std::vector<rpc::Action>& {
    ask_for_more();
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

// A session writes two chunks at a time and waits for room. The transport reports room when its
// queue has run low; while the queue has never been full, this function does.
void RpcPeer::ask_for_more() {
  for (const wire::ConnectionId id : std::exchange(fed_, {})) {
    const transport::Connection* connection = find(id);
    if (connection != nullptr && connection->writable())
      node_.event(&session::Session::writable, io::now(), id);
  }
}

transport::Connection* RpcPeer::find(wire::ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : found->second.get();
}

transport::Connection* RpcPeer::in_use(const rpc::Receiver& receiver) {
  const session::Session* session = node_.session_with(receiver);
  const auto id = session == nullptr ? std::nullopt : session->connection_in_use(io::now());
  return id ? find(*id) : nullptr;
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
  const auto found = connections_.find(action.connection);
  if (found == connections_.end()) return;  // it failed; the Node gets its end or has
  if (!can_bring_to_host(action.connection, action.frame.payload)) return;
  PathStats& path = stats_.paths[static_cast<std::size_t>(found->second->path())];
  ++path.frames_written;
  path.bytes_written += action.frame.bytes();
  record_frame(FlightKind::sent, action.connection, action.frame.header.type);
  if (action.frame.header.type == wire::FrameType::chunk) fed_.push_back(action.connection);
  found->second->write(std::move(action.frame));
  if (dirty_.empty() || dirty_.back() != found->second) dirty_.push_back(found->second);
}

void RpcPeer::perform(rpc::RunHandler& action) {
  const std::shared_ptr<Function>& function = functions_.at(action.function);  // Node checks it
  // Its first use was cancelled and has not returned; its late reply must not answer this call.
  if (running_.contains(action.key)) {
    return node_.reply(io::now(), action.key,
                       make_error(ErrorCode::wire, "the number of a call was used twice"));
  }
  auto responder = std::make_shared<Responder>(shared_from_this(), action.key,
                                               std::move(action.function), std::move(action.group),
                                               action.credit, std::move(action.arguments));
  record(FlightKind::handler, action.caller, action.key.id, responder->function());
  const auto handling =
      running_.emplace(action.key, Handling{responder, action.caller, now_}).first;
  Incoming incoming{responder, std::move(action.caller), {}, action.deadline};
  try {
    context_->workers().submit(
        [self = shared_from_this(), function, incoming = std::move(incoming)]() mutable {
          self->run(function, std::move(incoming));
        });
  } catch (...) {
    responder->disown();  // the caller gets the reason
    running_.erase(handling);
    throw;
  }
  ++stats_.calls_received;
  ++stats_.calls_running;
  ++function->running;
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
  const auto found = running_.find(action.key);
  if (found == running_.end()) return;
  if (const auto responder = found->second.responder.lock())
    responder->raise_credit(action.allowed);
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
  const auto found = running_.find(action.key);
  if (found == running_.end()) return;
  record(FlightKind::stop, found->second.caller, action.key.id, "");
  if (const auto responder = found->second.responder.lock()) responder->cancel();
  context_->workers().submit(std::move(found->second.held));
  found->second.unwanted = true;
  forget_if_over(found);
}

void RpcPeer::perform(rpc::HoldHandlers& action) {
  if (action.hold) {
    held_callers_.insert(action.caller);
  } else {
    held_callers_.erase(action.caller);
    for (auto at = running_.lower_bound({action.caller, 0});
         at != running_.end() && at->first.caller == action.caller; ++at) {
      context_->workers().submit(std::move(at->second.held));
    }
  }
  holds_handlers_ = !held_callers_.empty();
}

void RpcPeer::perform(rpc::Dial& action) {
  record(FlightKind::dial, "", 0, action.address);
  transport_for(action.address).dial(action.address);
}

void RpcPeer::perform(rpc::CloseConnection& action) {
  record(FlightKind::closed, "", action.connection, action.error.message);
  if (const auto connection = forget(action.connection, action.peer)) connection->close();
}

std::shared_ptr<transport::Connection> RpcPeer::forget(wire::ConnectionId id, const Uid& instance) {
  const auto node = connections_.extract(id);
  if (node.empty()) return nullptr;
  tell_observers(&PeerObserver::connection_ended, instance, node.mapped());
  return node.mapped();
}

void RpcPeer::perform(rpc::AllocateGrant& action) {
  transport::Grant grant;  // empty: there is none
  if (transport::Connection* connection = find(action.connection)) {
    grant = connection->allocate_grant(action.bytes).value_or(transport::Grant{});
  }
  node_.event(&session::Session::grant_ready, io::now(), action.connection, action.seq, action.part,
              grant.place, std::move(grant.memory));
}

void RpcPeer::perform(rpc::FillGrant& action) {
  transport::Connection* connection = find(action.connection);
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
      session == nullptr ? std::nullopt : session->take_standing(io::now(), bytes);
  if (!standing) return std::nullopt;
  transport::Connection* connection = find(standing->connection);
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
  node_.event(&session::Session::release_standing, io::now(), connection, grant);
  operation_done();
}

void RpcPeer::perform(rpc::PassSegments& action) {
  transport::Connection* connection = find(action.connection);
  const bool passed =
      connection != nullptr &&
      std::ranges::all_of(action.segments, [&](std::uint64_t segment) MOOLINK_LOCKED {
        return connection->pass_segment(segment);
      });
  node_.event(&session::Session::segments_passed, io::now(), action.connection, action.seq, passed);
}

void RpcPeer::perform(rpc::MapLoan& action) {
  transport::Connection* connection = find(action.connection);
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

}  // namespace moolink::runtime
