#include "rpc/node.h"

#include <algorithm>
#include <utility>

#include "rpc/explain.h"
#include "rpc/messages.h"

namespace moolink::rpc {

Node::Node(Config config, Allocator& allocator, const Authenticator& authenticator)
    : shared_{std::move(config), authenticator},
      peers_(shared_, allocator),
      handlers_(shared_, peers_),
      calls_(shared_, peers_, handlers_),
      dialler_(shared_, peers_, table_),
      directory_(shared_, peers_, calls_, dialler_),
      connections_(shared_, peers_, table_, dialler_, directory_) {}

// ---- the user's side ----

CallId Node::call(Time now, const std::string& peer, const std::string& function,
                  wire::Payload arguments, Duration timeout, std::uint16_t lane,
                  std::uint64_t credit) {
  Call& call = calls_.add(now, peer, function, std::move(arguments), timeout, lane, credit);
  const CallId id = call.id;
  guard([&] { begin_call(now, call); }, [&](const Error& error) { calls_.fail_begun(id, error); });
  settle(now);
  return id;
}

void Node::begin_call(Time now, Call& call) {
  if (shared_.closing) {
    calls_.fail(call.id, ErrorCode::closed, "peer '" + shared_.config.name + "' was closed");
    return;
  }
  calls_.arm(call);
  if (directory_.means_this(call.receiver)) {
    calls_.run_here(call);
  } else if (Peer* peer = directory_.receiver_of(call.receiver)) {
    calls_.dispatch(now, *peer, call);
  } else {
    directory_.add(now, call);
  }
}

void Node::raise_credit(Time now, CallId id, std::uint64_t more) {
  Call* call = calls_.find(id);
  if (call == nullptr || !call->stream) return;  // it has ended
  calls_.raise_credit(now, *call, more);
  settle(now);
}

void Node::cancel(Time now, CallId id) {
  const Call* call = calls_.find(id);
  if (call == nullptr) return;
  calls_.cancel(now, *call);
  settle(now);
}

void Node::reply(Time now, const CallKey& key, Reply reply) {
  const auto items = handlers_.end(key);
  if (!items) return;
  if (key.caller == shared_.config.instance) {
    calls_.complete(key.id, std::move(reply));
  } else if (Peer* peer = peers_.find(key.caller)) {
    handlers_.send_result(now, *peer, key.id, std::move(reply), *items);
  }
  settle(now);
}

void Node::send_item(Time now, const CallKey& key, wire::Payload item) {
  if (key.caller != shared_.config.instance) {
    if (!handlers_.send_item(now, key, std::move(item))) return;
  } else if (const auto number = handlers_.number_item(key)) {
    calls_.take_item(now, key.id, *number, std::move(item));
  } else {
    return;
  }
  settle(now);
}

void Node::connect(Time now, const std::string& address) {
  if (shared_.closing) return;
  dialler_.connect(now, address);
  settle(now);
}

void Node::set_name(const std::string& name) {
  check_name("a peer's name", name);
  if (name == shared_.config.name) return;
  if (connections_.has_greeted()) {
    throw Exception(ErrorCode::invalid_argument,
                    "peer '" + shared_.config.name +
                        "' cannot change its name: it is connected; call set_name before connect");
  }
  shared_.config.name = name;
}

void Node::send_service_to(Time now, const Uid& instance, const std::string& name, Service service,
                           wire::Payload payload, const std::string& scope) {
  if (shared_.closing) return;
  const Config& own = shared_.config;
  if (instance == own.instance || (instance.empty() && name == own.name)) {
    shared_.post(ServiceMessage{own.instance, own.name, service, std::move(payload)});
    return;
  }
  Peer* peer = peers_.find(instance);
  if (peer != nullptr && !peer->may_concern(scope)) return;
  const bool any = instance.empty();
  if (any && (peer == nullptr || !peer->up)) {
    peer = peers_.find(name, {});
    if (peer == nullptr) peer = peers_.find(name, scope);
  }
  if (peer != nullptr && peer->up) {
    peers_.send_service(now, *peer, service, std::move(payload));
  } else if (!name.empty() && name != own.name) {
    directory_.add(now, name, service_message(service, std::move(payload)), any ? Uid{} : instance,
                   scope);
  }
  settle(now);
}

void Node::close(Time now) {
  if (shared_.closing) return;
  shared_.closing = true;
  calls_.fail_all();
  directory_.close();
  close_at_ = now + shared_.config.close_within;
  shared_.timers.push({close_at_, Timer::Kind::close, 0, {}});
  settle(now);
}

// Once replies are sent, or their time is up.
void Node::finish_close(Time now) {
  if (!shared_.closing || closed_) return;
  const auto flushed = [](const auto& entry) { return entry.second->flushed(); };
  if (now < close_at_ && !std::ranges::all_of(peers_.all(), flushed)) return;
  closed_ = true;
  const Error reason =
      make_error(ErrorCode::closed, "peer '" + shared_.config.name + "' was closed");
  for (const auto& [instance, peer] : peers_.all()) {
    peer->down_reason = Down::closed;
    peer->session.end(reason, true);
    peers_.touch(*peer);
  }
  settle(now);
  while (!table_.all().empty()) {
    connections_.drop(now, table_.all().begin()->first, make_error(ErrorCode::closed, "closed"),
                      true);
  }
  shared_.post(Closed{});
}

// ---- the network's side ----

void Node::opened(Time now, ConnectionId id, wire::PathKind kind, const wire::PathTraits& traits,
                  const std::string& dialled) {
  connections_.opened(now, id, kind, traits, dialled);
  settle(now);
}

void Node::dial_failed(Time now, const std::string& address, const Error& error) {
  connections_.dial_failed(now, address, error);
  settle(now);
}

void Node::received(Time now, ConnectionId id, const wire::ReceivedFrame& frame) {
  Connection* connection = table_.find(id);
  if (connection == nullptr) return;  // closed by this side
  if (Connections::greets(*connection, frame.header.type)) {
    connections_.greeted(now, *connection, frame);
    return settle(now);
  }
  Peer& peer = *connection->peer;
  peers_.guarded(peer, [&] {
    peers_.touch(peer);
    if (frame.header.type != wire::FrameType::close) return peer.session.received(now, id, frame);
    const auto close = wire::decode_control<wire::Close>(frame);
    if (close.code == ErrorCode::closed) return peers_.end(peer, Down::closed, "it was closed");
    peers_.end(peer, Down::unreachable, "it ended the session: " + close.text);
  });
  settle(now);
}

std::span<std::byte> Node::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  Connection* found = table_.find_attached(connection);
  if (found == nullptr) return {};
  std::span<std::byte> target;
  Peer& peer = *found->peer;
  peers_.guarded(peer, [&] {
    target = peer.session.chunk_target(connection, head);
    if (!peer.session.has(connection)) peers_.touch(peer);  // it has broken the protocol
  });
  return target;
}

void Node::return_loans(Time now, const Uid& lender, std::uint64_t session,
                        std::span<const std::uint64_t> loans) {
  Peer* peer = peers_.find(lender);
  if (peer == nullptr) return;
  peers_.guarded(*peer, [&] {
    peers_.touch(*peer);
    peer->session.return_loans(now, session, loans);
  });
  settle(now);
}

session::Session* Node::session_with(const Receiver& receiver) const {
  const auto* name = std::get_if<const std::string*>(&receiver);
  Peer* peer = name != nullptr ? directory_.receiver_of(PeerName::of(**name))
                               : peers_.find(std::get<Uid>(receiver));
  return peer == nullptr ? nullptr : &peer->session;
}

void Node::closed(Time now, ConnectionId id, const Error& error) {
  connections_.drop(now, id, error, false);
  connections_.turned_away(now, error);
  settle(now);
}

void Node::fail_peer(Time now, const Uid& instance, const Error& error) {
  Peer* peer = peers_.find(instance);
  if (peer == nullptr || !peer->up) return directory_.undelivered(instance);
  peers_.guarded(*peer, [&] { peers_.fail_session(*peer, error); });
  settle(now);
}

void Node::peer_dead(Time now, const Uid& instance) {
  const auto end = [&] {
    if (Peer* peer = peers_.find(instance)) peers_.end(*peer, Down::dead, "its process has ended");
  };
  guard(end, [&](const Error&) { end(); });
  settle(now);
}

Uid Node::instance_of(ConnectionId connection) const {
  const Connection* found = table_.find(connection);
  return found != nullptr && found->peer != nullptr ? found->peer->instance : Uid{};
}

bool Node::may_concern(const Uid& instance, const std::string& group) const {
  if (instance == shared_.config.instance) return true;
  const Peer* peer = peers_.find(instance);
  return peer != nullptr && peer->may_concern(group);
}

bool Node::is_certain_alone(const Uid& instance, const PeerName& member) const {
  if (instance == shared_.config.instance) return true;
  if (const Peer* peer = peers_.find(instance); peer != nullptr && peer->up) {
    return peer->scope.empty();
  }
  const Peer* namesake = peers_.find(member.name, member.group);
  return namesake != nullptr && namesake->up;
}

Explanation Node::explain(Time now, const std::string& peer) const {
  return Explainer(shared_, peers_, table_, dialler_, directory_).explain(now, peer);
}

std::vector<PendingCall> Node::pending_calls(Time now) const {
  return calls_.pending(now, [&](const PeerName& of) { return directory_.why_unreached(of); });
}

// ---- time ----

// After an exception the timer is due again with the next tick.
void Node::tick(Time now) {
  TimerQueue& timers = shared_.timers;
  while (!timers.empty() && timers.next() <= now) {
    const Timer timer = timers.top();
    timers.pop();
    if (!counts(timer)) continue;
    try {
      due(now, timer);
    } catch (...) {
      timers.push(timer);
      throw;
    }
    settle(now);  // the next timer must not find anything that this one has ended
  }
  settle(now);
}

// Whether a timer is still valid.
bool Node::counts(const Timer& timer) const {
  switch (timer.kind) {
    case Timer::Kind::call:
      return calls_.counts(timer);
    case Timer::Kind::handler:
      return handlers_.counts(timer);
    case Timer::Kind::session:
      return peers_.counts(timer);
    case Timer::Kind::greeting:
      return table_.counts(timer);
    case Timer::Kind::dial:
    case Timer::Kind::search:
    case Timer::Kind::close:
      return true;  // checked when they are due
  }
  return true;
}

void Node::due(Time now, const Timer& timer) {
  switch (timer.kind) {
    case Timer::Kind::call:
      return calls_.time_out(now, timer.id,
                             [&](const PeerName& of) { return directory_.why_unreached(of); });
    case Timer::Kind::handler:
      return handlers_.stop({timer.instance, timer.id}, true);
    case Timer::Kind::session: {
      Peer& peer = *peers_.find(timer.instance);
      peer.timer = kNever;
      peers_.guarded(peer, [&] {
        peers_.touch(peer);
        peer.session.tick(now);
        dialler_.watch_silence(now, peer);
      });
      return;
    }
    case Timer::Kind::greeting:
      return connections_.greeting_due(now, timer.id);
    case Timer::Kind::dial:
      if (DialTarget* target = dialler_.due(now, timer.id)) {
        dialler_.dial(now, *target, directory_.searches(target->peer));
      }
      return;
    case Timer::Kind::search:
      return directory_.due(now, timer.id);
    case Timer::Kind::close:
      return;  // settle() looks
  }
}

// ---- the actions of sessions ----

void Node::settle(Time now) {
  peers_.retry_broken_sessions([&](Peer& peer) { lost(now, peer); });
  while (Peer* peer = peers_.next_touched()) settle_peer(now, *peer);
  if (shared_.timers.needs_sweep()) {
    shared_.timers.sweep([this](const Timer& timer) { return counts(timer); });
  }
  finish_close(now);
}

void Node::settle_peer(Time now, Peer& peer) {
  do {
    peers_.guarded(peer, [&] {
      handlers_.balance_window(now, peer);
      handlers_.balance_handlers(peer);
    });
    peer.session.drain(session_actions_);
    for (session::Action& action : session_actions_) {
      peers_.guarded(peer, [&] { perform(now, peer, action); });
    }
  } while (!session_actions_.empty());
  peer.touched = false;
  peers_.guarded(peer, [&] { peers_.arm(peer); });
  if (!peer.lost) forget_if_gone(peer);
}

void Node::perform(Time now, Peer& peer, session::Action& action) {
  if (auto* delivered = std::get_if<session::Deliver>(&action)) {
    deliver(now, peer, *delivered);
  } else if (auto* attached_to = std::get_if<session::Attached>(&action)) {
    attached(now, peer, attached_to->connection);
  } else if (std::holds_alternative<session::WindowOpened>(action)) {
    if (peers_.flush(now, peer)) calls_.flush(now, peer);
  } else if (auto* close = std::get_if<session::CloseConnection>(&action)) {
    connections_.drop(now, close->connection, close->error, true);
  } else if (auto* lost_session = std::get_if<session::Lost>(&action)) {
    peers_.set_lost(peer, std::move(*lost_session));
    lost(now, peer);
  } else {
    std::visit(
        [this](auto& of_connection) {
          if constexpr (std::is_constructible_v<Action, decltype(std::move(of_connection))>) {
            shared_.post(std::move(of_connection));
          }
        },
        action);
  }
}

void Node::attached(Time now, Peer& peer, ConnectionId id) {
  Connection* connection = table_.find(id);
  if (connection == nullptr) return;
  connection->attached = true;
  const std::uint64_t features = connection->features();
  shared_.post(Establish{id, features});
  dialler_.attached(*connection, peer);
  if (!peer.up) {
    peer.up = true;
    peer.down_reason = Down::unreachable;
    directory_.expect(now, peer);
    shared_.post(PeerUp{peer.instance, peer.name, peer.host_key,
                        peer.host_key == shared_.config.host_key, peer.scope});
    directory_.met(now, peer, features);
  }
  if (connection->kind != wire::PathKind::shm && !connection->dialled.empty()) {
    dialler_.dial_better_path(now, peer);
  }
}

void Node::deliver(Time now, Peer& peer, session::Deliver& delivered) {
  delivered.payload.from_guest = !peer.scope.empty() && peer.scope != shared_.authenticator.scope();
  try {
    switch (static_cast<MessageKind>(delivered.kind)) {
      case MessageKind::call:
        return handlers_.delivered_call(now, peer, delivered);
      case MessageKind::result:
        return calls_.delivered_result(peer, delivered);
      case MessageKind::cancel:
        return handlers_.delivered_cancel(peer, delivered);
      case MessageKind::stream:
        return calls_.delivered_item(now, peer, delivered);
      case MessageKind::credit:
        return handlers_.delivered_credit(peer, delivered);
      case MessageKind::service:
        return deliver_service(now, peer, delivered);
    }
    wire::fail("a message of an unknown kind");
  } catch (const Exception& broken) {
    if (broken.error().code != ErrorCode::wire) throw;
    shared_.log(LogLevel::warning,
                "peer '" + peer.name +
                    "' broke the protocol and is disconnected: " + broken.error().message);
    peers_.end(peer, Down::unreachable, broken.error().message);
  }
}

void Node::deliver_service(Time now, Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<ServiceHead>(delivered.payload.body);
  if (delivered.error) {
    // No peer would resend the lost message to the machines above; they handle lost sessions.
    peers_.end(peer, Down::unreachable, "a message of it was lost: " + delivered.error.message);
    return;
  }
  wire::Payload payload = user_payload(std::move(delivered.payload));
  const auto service = static_cast<Service>(head.service);
  if (service == Service::directory) return directory_.directory_message(now, peer, payload);
  if (service == Service::namesakes) return directory_.namesakes_message(now, peer, payload);
  shared_.post(ServiceMessage{peer.instance, peer.name, service, std::move(payload)});
}

// The session is gone: ends everything that depended on it. Repeatable after an exception.
void Node::lost(Time now, Peer& peer) {
  const session::Lost& lost = *peer.lost;
  peer.queued.clear();
  peer.queued_bytes = 0;
  peer.queued_lanes.clear();
  peer.early_cancels.clear();
  calls_.fail_all_of(peer, lost);
  handlers_.stop_all_of(peer.instance);
  handlers_.balance_handlers(peer);
  peer.held = false;
  if (peer.up) {
    directory_.lost(now, peer, lost.reason.message);
    shared_.post(PeerDown{peer.instance, peer.name, peer.down_reason});
    peer.up = false;
    peer.names_asked.clear();
  }
  peer.down_reason = Down::unreachable;
  peer.lost.reset();
}

void Node::forget_if_gone(const Peer& peer) {
  if (peer.touched || peer.up || peer.session.id() != 0 || peer.session.has_connection()) return;
  // For lack of memory, its end may not have been carried out.
  if (table_.any_of(peer, [](const Connection&) { return true; })) return;
  directory_.forget(peer);
  peers_.forget(peer);
}

}  // namespace moolink::rpc
