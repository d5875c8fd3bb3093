#include "rpc/peers.h"

#include "rpc/messages.h"

namespace moolink::rpc {

session::OutgoingMessage service_message(Service service, wire::Payload payload) {
  session::OutgoingMessage message =
      message_of(MessageKind::service,
                 with_head(ServiceHead{static_cast<std::uint8_t>(service)}, std::move(payload)));
  message.lane = static_cast<std::uint16_t>(kServiceLanes | static_cast<std::uint16_t>(service));
  return message;
}

Peer* Peers::find(const std::string& name) const {
  const auto found = names_.lower_bound({name, {}});
  return found == names_.end() || found->first.first != name ? nullptr : find(found->second);
}

Peer* Peers::find(const std::string& name, const std::string& scope) const {
  const auto found = names_.find({name, scope});
  return found == names_.end() ? nullptr : find(found->second);
}

std::set<std::string> Peers::groups_of(const std::string& name) const {
  std::set<std::string> groups;
  for (auto at = names_.lower_bound({name, {}}); at != names_.end() && at->first.first == name;
       ++at) {
    const Peer* peer = find(at->second);
    if (peer != nullptr && peer->up) groups.insert(at->first.second);
  }
  return groups;
}

bool Peers::answers(Time now, const Peer* peer) {
  if (peer == nullptr || !peer->session.connected()) return false;
  return !peer->session.suspected(now);
}

std::vector<PeerInfo> Peers::infos(Time now) const {
  std::vector<PeerInfo> infos;
  for (const auto& [instance, peer] : peers_) {
    if (!peer->up) continue;
    PeerInfo info;
    info.instance = instance;
    info.name = peer->name;
    info.scope = peer->scope;
    info.host_key = peer->host_key;
    info.same_host = peer->host_key == shared_.config.host_key;
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

Peer& Peers::ensure(const Uid& instance) {
  if (Peer* known = find(instance)) return *known;
  session::Config of_session;
  of_session.self = shared_.config.instance;
  of_session.peer = instance;
  of_session.first_id = ++made_ << 32;
  of_session.limits = shared_.config.limits;
  of_session.timing = shared_.config.timing;
  auto peer = std::make_unique<Peer>(std::move(of_session), allocator_);
  return *peers_.emplace(instance, std::move(peer)).first->second;
}

void Peers::set_name(Peer& peer, const std::string& name, const std::string& scope) {
  peer.name = name;
  peer.scope = scope;
  names_[{name, scope}] = peer.instance;
}

void Peers::forget(const Peer& peer) {
  const auto name = names_.find({peer.name, peer.scope});
  if (name != names_.end() && name->second == peer.instance) names_.erase(name);
  peers_.erase(peer.instance);
}

// ---- sessions ----

Peer* Peers::next_touched() {
  if (touched_.empty()) return nullptr;
  Peer* peer = touched_.front();
  touched_.pop_front();
  return peer;
}

void Peers::fail_session(Peer& peer, const Error& error) {
  touch(peer);
  peer.down_reason = Down::unreachable;
  peer.session.end(make_error(ErrorCode::error, error.message), true);
}

void Peers::end(Peer& peer, Down reason, const std::string& why) {
  peer.down_reason = reason;
  peer.session.end(make_error(ErrorCode::peer_lost, why), false);
  touch(peer);
}

void Peers::arm(Peer& peer) {
  const Time next = peer.session.next_deadline();
  if (next >= peer.timer) return;  // an early tick does no harm
  peer.timer = next;
  shared_.timers.push({next, Timer::Kind::session, 0, peer.instance});
}

// ---- messages ----

void Peers::send(Time now, Peer& peer, session::OutgoingMessage message) {
  session::check(message, shared_.config.limits);
  if (!peer.session.ready()) return;  // it is being lost
  guarded(peer, [&] {
    touch(peer);
    const bool small = message.payload.bytes() <= session::kInlineBytes;
    const bool has_order = peer.queued_lanes.must_wait(message.lane);
    if (!has_order && (small || peer.queued.empty()) &&
        peer.session.send(now, std::move(message))) {
      return;
    }
    queue(peer, std::move(message));  // NOLINT(bugprone-use-after-move): send() left it
  });
}

void Peers::queue(Peer& peer, session::OutgoingMessage message) {
  if (peer.queued.size() >= shared_.config.max_waiting_calls) {
    shared_.log(LogLevel::warning, "peer '" + peer.name + "' takes nothing and is disconnected: " +
                                       std::to_string(peer.queued.size()) +
                                       " messages wait for it");
    end(peer, Down::unreachable, "it takes nothing");
    return;
  }
  peer.queued_bytes += message.payload.bytes();
  peer.queued_lanes.add(message.lane);
  peer.queued.push_back(std::move(message));
}

void Peers::send_service(Time now, Peer& peer, Service service, wire::Payload payload) {
  session::OutgoingMessage message;
  const bool made = guarded(peer, [&] { message = service_message(service, std::move(payload)); });
  if (made) send(now, peer, std::move(message));
}

bool Peers::flush(Time now, Peer& peer) {
  while (!peer.queued.empty()) {
    const std::size_t bytes = peer.queued.front().payload.bytes();
    const std::uint16_t lane = peer.queued.front().lane;
    if (!peer.session.send(now, std::move(peer.queued.front()))) return false;
    peer.queued_bytes -= bytes;
    peer.queued_lanes.remove(lane);
    peer.queued.pop_front();
  }
  return true;
}

}  // namespace moolink::rpc
