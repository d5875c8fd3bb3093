// Peers, their sessions and the sessions' actions; services.

#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "rpc/node.h"

namespace moolink::rpc {

namespace {

session::OutgoingMessage service_message(Service service, wire::Payload payload) {
  session::OutgoingMessage message =
      message_of(MessageKind::service,
                 with_head(ServiceHead{static_cast<std::uint8_t>(service)}, std::move(payload)));
  message.lane = static_cast<std::uint16_t>(kServiceLanes | static_cast<std::uint16_t>(service));
  if (mutant("unordered_services")) message.lane = 0;
  return message;
}

}  // namespace

Peer& Node::ensure_peer(const Uid& instance) {
  if (Peer* known = find_peer(instance)) return *known;
  session::Config of_session;
  of_session.self = config_.instance;
  of_session.peer = instance;
  of_session.first_id = ++peers_made_ << 32;
  of_session.limits = config_.limits;
  of_session.timing = config_.timing;
  auto peer = std::make_unique<Peer>(std::move(of_session), *allocator_);
  return *peers_.emplace(instance, std::move(peer)).first->second;
}

Peer* Node::find_peer(const Uid& instance) const {
  const auto found = peers_.find(instance);
  return found == peers_.end() ? nullptr : found->second.get();
}

Peer* Node::find_peer(const std::string& name) const {
  const auto found = names_.lower_bound({name, {}});
  return found == names_.end() || found->first.first != name ? nullptr : find_peer(found->second);
}

Peer* Node::find_peer(const std::string& name, const std::string& scope) const {
  const auto found = names_.find({name, scope});
  return found == names_.end() ? nullptr : find_peer(found->second);
}

Peer* Node::find_peer(const Receiver& receiver) const {
  const auto* name = std::get_if<const std::string*>(&receiver);
  return name != nullptr ? receiver_of(PeerName::of(**name)) : find_peer(std::get<Uid>(receiver));
}

void Node::touch(Peer& peer) {
  if (peer.touched) return;
  touched_.push_back(&peer);
  peer.touched = true;
}

void Node::settle(Time now) {
  if (any_broken_) mend(now);
  while (!touched_.empty()) {
    Peer& peer = *touched_.front();
    touched_.pop_front();
    settle_peer(now, peer);
  }
  finish_close(now);
}

void Node::settle_peer(Time now, Peer& peer) {
  do {
    guarded(peer, [&] {
      balance_window(now, peer);
      balance_handlers(peer);
    });
    peer.session.drain(session_actions_);
    for (session::Action& action : session_actions_) {
      guarded(peer, [&] { perform(now, peer, action); });
    }
  } while (!session_actions_.empty());
  peer.touched = false;
  guarded(peer, [&] { arm(peer); });
  if (!peer.lost) forget_if_gone(peer);
}

// An action that fails here is lost to the peer: both ends of the session get the reason.
void Node::break_off(Peer& peer, const Error& error) {
  touch(peer);
  peer.how = Down::unreachable;
  peer.session.end(make_error(ErrorCode::error, error.message), true);
}

void Node::fail_peer(Time now, const Uid& instance, const Error& error) {
  Peer* peer = find_peer(instance);
  if (peer == nullptr || !peer->up) return undelivered(instance);
  guarded(*peer, [&] { break_off(*peer, error); });
  settle(now);
}

// Ends sessions that could not end for lack of memory.
void Node::mend(Time now) {
  any_broken_ = false;
  for (const auto& [instance, entry] : peers_) {
    Peer& peer = *entry;
    guarded(peer, [&] {
      if (std::exchange(peer.broken, false)) {
        break_off(peer, make_error(ErrorCode::error, "out of memory"));
      }
      if (peer.lost) lost(now, peer);
    });
    any_broken_ = any_broken_ || peer.lost;
  }
}

void Node::arm(Peer& peer) {
  const Time next = peer.session.next_deadline();
  if (next >= peer.timer) return;  // an early tick does no harm
  peer.timer = next;
  timers_.push({next, Timer::Kind::session, 0, peer.instance});
}

// Whether a timer is still valid.
bool Node::counts(const Timer& timer) const {
  switch (timer.kind) {
    case Timer::Kind::call: {
      const auto found = calls_.find(timer.id);
      return found != calls_.end() && found->second.deadline == timer.at;
    }
    case Timer::Kind::handler: {
      const auto found = running_.find({timer.instance, timer.id});
      return found != running_.end() && found->second.deadline == timer.at;
    }
    case Timer::Kind::session: {
      const auto found = peers_.find(timer.instance);
      return found != peers_.end() && found->second->timer == timer.at;
    }
    case Timer::Kind::greeting: {
      const auto found = connections_.find(timer.id);
      return found != connections_.end() && !found->second.attached;
    }
    case Timer::Kind::dial:
    case Timer::Kind::search:
    case Timer::Kind::close:
      return true;  // checked when they are due
  }
  return true;
}

void Node::perform(Time now, Peer& peer, session::Action& action) {
  if (auto* delivered = std::get_if<session::Deliver>(&action)) {
    deliver(now, peer, *delivered);
  } else if (auto* attached_to = std::get_if<session::Attached>(&action)) {
    attached(now, peer, attached_to->connection);
  } else if (std::holds_alternative<session::WindowOpened>(action)) {
    flush(now, peer);
  } else if (auto* close = std::get_if<session::CloseConnection>(&action)) {
    drop_connection(now, close->connection, close->error, true);
  } else if (auto* lost_session = std::get_if<session::Lost>(&action)) {
    peer.lost = std::move(*lost_session);
    any_broken_ = true;
    lost(now, peer);
  } else {
    std::visit(
        [this](auto& of_connection) {
          if constexpr (std::is_constructible_v<Action, decltype(std::move(of_connection))>) {
            actions_.push_back(std::move(of_connection));
          }
        },
        action);
  }
}

// The path works, or works again. If it is lost, it is dialled while another path is used.
void Node::best_path_works(DialTarget& target, Peer& peer) {
  target.better_path = true;
  if (std::exchange(peer.fallback_told, false)) {
    log(LogLevel::info, std::string(wire::kTechnologies[wire::kBestBetweenHosts]) + " to peer '" +
                            peer.name + "' works again");
  }
}

void Node::attached(Time now, Peer& peer, ConnectionId id) {
  Connection* connection = find_connection(id);
  if (connection == nullptr) return;
  connection->attached = true;
  actions_.push_back(Establish{id, connection->ours.features & connection->theirs->features});
  if (DialTarget* target = dialler_.of_connection(id)) {
    dialler_.succeeded(*target, peer.instance);
    peer.tried.erase(target->address);
    if (connection->kind == wire::kBestBetweenHosts) best_path_works(*target, peer);
  }
  if (!peer.up) {
    peer.up = true;
    peer.how = Down::unreachable;
    past_.erase(peer.name);
    // First the overdue messages: they waited while the peer was not up.
    const auto own = searches_.find(PeerName{peer.name, {}});
    if (own != searches_.end()) drop_overdue(now, own->second);
    actions_.push_back(PeerUp{peer.instance, peer.name, peer.host_key,
                              peer.host_key == config_.host_key, peer.scope});
    const std::uint64_t both = connection->ours.features & connection->theirs->features;
    peer.tells_namesakes = peer.scope.empty() && (both & wire::kNamesakesFeature) != 0;
    met(now, peer);
    end_search(now, peer);
    for (const auto& [of, search] : searches_) {
      if (may_ask(peer, search)) ask(now, peer, of.name);
    }
  }
  if (connection->kind != wire::PathKind::shm && !connection->dialled.empty()) {
    dial_better_path(now, peer);
  }
}

void Node::deliver(Time now, Peer& peer, session::Deliver& delivered) {
  delivered.payload.from_guest = !peer.scope.empty() && peer.scope != authenticator_->scope();
  try {
    switch (static_cast<MessageKind>(delivered.kind)) {
      case MessageKind::call:
        return delivered_call(now, peer, delivered);
      case MessageKind::result:
        return delivered_result(peer, delivered);
      case MessageKind::cancel:
        return delivered_cancel(peer, delivered);
      case MessageKind::stream:
        return delivered_item(now, peer, delivered);
      case MessageKind::credit:
        return delivered_credit(peer, delivered);
      case MessageKind::service: {
        const auto head = wire::decode<ServiceHead>(delivered.payload.body);
        if (delivered.error) {
          // No peer would resend the lost message to the machines above; they handle lost sessions.
          end_peer(peer, Down::unreachable, "a message of it was lost: " + delivered.error.message);
          return;
        }
        wire::Payload payload = user_payload(std::move(delivered.payload));
        const auto service = static_cast<Service>(head.service);
        if (service == Service::directory) return directory_message(now, peer, payload);
        if (service == Service::namesakes) return namesakes_message(now, peer, payload);
        actions_.push_back(ServiceMessage{peer.instance, peer.name, service, std::move(payload)});
        return;
      }
    }
    wire::fail("a message of an unknown kind");
  } catch (const Exception& broken) {
    if (broken.error().code != ErrorCode::wire) throw;
    log(LogLevel::warning, "peer '" + peer.name + "' broke the protocol and is disconnected: " +
                               broken.error().message);
    end_peer(peer, Down::unreachable, broken.error().message);
  }
}

// The session is gone: ends everything that depended on it. Repeatable after an exception.
void Node::lost(Time now, Peer& peer) {
  const session::Lost& lost = *peer.lost;
  peer.queued.clear();
  peer.queued_bytes = 0;
  peer.queued_lanes.clear();
  peer.early_cancels.clear();
  fail_calls_of(peer, lost);
  peer.backlog.clear();
  peer.backlog_lanes.clear();
  stop_all_of(peer.instance);
  balance_handlers(peer);
  peer.held = false;
  if (peer.up) {
    remember(now, peer.name, {now, lost.reason.message, {}, peer.tried});
    actions_.push_back(PeerDown{peer.instance, peer.name, peer.how});
    peer.up = false;
    peer.names_asked.clear();
  }
  peer.how = Down::unreachable;
  peer.lost.reset();
}

void Node::end_peer(Peer& peer, Down how, const std::string& why) {
  peer.how = how;
  peer.session.end(make_error(ErrorCode::peer_lost, why), false);
  touch(peer);
}

void Node::peer_dead(Time now, const Uid& instance) {
  const auto end = [&] {
    if (Peer* peer = find_peer(instance)) end_peer(*peer, Down::dead, "its process has ended");
  };
  guard(end, [&](const Error&) { end(); });
  settle(now);
}

void Node::return_loans(Time now, const Uid& lender, std::uint64_t session,
                        std::span<const std::uint64_t> loans) {
  Peer* peer = find_peer(lender);
  if (peer == nullptr || mutant("loans_are_not_returned")) return;
  guarded(*peer, [&] {
    touch(*peer);
    peer->session.return_loans(now, session, loans);
  });
  settle(now);
}

void Node::forget_if_gone(Peer& peer) {
  if (peer.touched || peer.up || peer.session.id() != 0 || peer.session.has_connection()) return;
  // For lack of memory, its end may not have been carried out.
  const bool referred_to = std::ranges::any_of(
      connections_, [&](const auto& entry) { return entry.second.peer == &peer; });
  if (referred_to) return;
  std::erase_if(meanings_, [&](const auto& entry) { return entry.second == peer.instance; });
  const auto name = names_.find({peer.name, peer.scope});
  if (name != names_.end() && name->second == peer.instance) names_.erase(name);
  peers_.erase(peer.instance);
}

// ---- sending ----

void Node::send_or_queue(Time now, Peer& peer, session::OutgoingMessage message) {
  session::check(message, config_.limits);
  if (!peer.session.ready()) return;  // it is being lost
  guarded(peer, [&] {
    touch(peer);
    const bool small = message.payload.bytes() <= session::kInlineBytes;
    const bool has_order =
        peer.queued_lanes.must_wait(message.lane) && !mutant("overtake_in_queue");
    if (!has_order && (small || peer.queued.empty()) &&
        peer.session.send(now, std::move(message))) {
      return;
    }
    if (mutant("drop_when_window_is_full")) return;
    queue(peer, std::move(message));  // NOLINT(bugprone-use-after-move): send() left it
  });
}

// Holds calls back while their results wait here; a peer that ignores this is disconnected.
void Node::queue(Peer& peer, session::OutgoingMessage message) {
  if (peer.queued.size() >= config_.max_waiting_calls) {
    log(LogLevel::warning, "peer '" + peer.name + "' takes nothing and is disconnected: " +
                               std::to_string(peer.queued.size()) + " messages wait for it");
    end_peer(peer, Down::unreachable, "it takes nothing");
    return;
  }
  peer.queued_bytes += message.payload.bytes();
  peer.queued_lanes.add(message.lane);
  peer.queued.push_back(std::move(message));
}

// The messages that the window had refused, in order.
void Node::flush(Time now, Peer& peer) {
  while (!peer.queued.empty()) {
    const std::size_t bytes = peer.queued.front().payload.bytes();
    const std::uint16_t lane = peer.queued.front().lane;
    if (!peer.session.send(now, std::move(peer.queued.front()))) return;
    peer.queued_bytes -= bytes;
    peer.queued_lanes.remove(lane);
    peer.queued.pop_front();
  }
  while (!peer.backlog.empty()) {
    const auto [id, lane] = peer.backlog.front();
    const auto found = calls_.find(id);
    if (found != calls_.end() && !transmit_call(now, peer, id, found->second) &&
        calls_.contains(id)) {
      return;  // the window is full again
    }
    peer.backlog.pop_front();
    peer.backlog_lanes.remove(lane);
  }
}

void Node::send_to(Time now, Peer& peer, Service service, wire::Payload payload) {
  session::OutgoingMessage message;
  const bool made = guarded(peer, [&] { message = service_message(service, std::move(payload)); });
  if (made) send_or_queue(now, peer, std::move(message));
}

void Node::send_service_to(Time now, const Uid& instance, const std::string& name, Service service,
                           wire::Payload payload, const std::string& scope) {
  if (closing_) return;
  if (instance == config_.instance || (instance.empty() && name == config_.name)) {
    actions_.push_back(ServiceMessage{config_.instance, config_.name, service, std::move(payload)});
    return;
  }
  Peer* peer = find_peer(instance);
  if (peer != nullptr && !may_concern(*peer, scope)) return;
  const bool any = instance.empty() || mutant("services_by_name");
  if (any && (peer == nullptr || !peer->up)) {
    peer = find_peer(name, {});
    if (peer == nullptr) peer = find_peer(name, scope);
  }
  if (peer != nullptr && peer->up) {
    send_to(now, *peer, service, std::move(payload));
  } else if (!name.empty() && name != config_.name) {
    keep_for(now, name, service_message(service, std::move(payload)), any ? Uid{} : instance,
             scope);
  }
  settle(now);
}

std::vector<PeerInfo> Node::peers(Time now) const {
  std::vector<PeerInfo> infos;
  for (const auto& [instance, peer] : peers_) {
    if (!peer->up) continue;
    PeerInfo info;
    info.instance = instance;
    info.name = peer->name;
    info.scope = peer->scope;
    info.host_key = peer->host_key;
    info.same_host = peer->host_key == config_.host_key;
    info.connected = peer->session.connected();
    info.suspected = peer->session.suspected(now);
    info.addresses = peer->addresses;
    info.unacknowledged_bytes = peer->session.unacknowledged_bytes();
    info.loans_given = peer->session.loans_given();
    info.loans_held = peer->session.loans_held();
    info.silent = now - peer->session.last_heard();
    info.calls_waiting = peer->backlog.size();
    info.calls_running = peer->running;
    for (const session::LinkInfo& link : peer->session.links(now)) {
      info.paths.push_back(link.kind);
      if (!link.in_use) continue;
      info.round_trip = link.round_trip;
      info.last_round_trip = link.last_round_trip;
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

}  // namespace moolink::rpc
