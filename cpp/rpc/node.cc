#include "rpc/node.h"

#include <algorithm>
#include <utility>

#include "base/names.h"
#include "rpc/state.h"

namespace moolink::rpc {

Node::Node(Config config, Allocator& allocator, const Policy& policy, std::uint64_t seed)
    : state_(std::make_unique<NodeState>(std::move(config), allocator, policy, seed)) {}
Node::~Node() = default;

CallId Node::call(Time now, const std::string& peer, const std::string& function,
                  wire::Payload arguments, Duration timeout, std::uint16_t lane) {
  const CallId id = state_->call(now, peer, function, std::move(arguments), timeout, lane, 0);
  state_->settle(now);
  return id;
}

CallId Node::stream(Time now, const std::string& peer, const std::string& function,
                    wire::Payload arguments, Duration timeout, std::uint16_t lane,
                    std::uint64_t credit) {
  const CallId id = state_->call(now, peer, function, std::move(arguments), timeout, lane, credit);
  state_->settle(now);
  return id;
}

void Node::raise_credit(Time now, CallId id, std::uint64_t more) {
  state_->raise_credit(now, id, more);
  state_->settle(now);
}

void Node::cancel(Time now, CallId id) {
  state_->cancel(now, id);
  state_->settle(now);
}

void Node::reply(Time now, const CallKey& key, Reply reply) {
  state_->reply(now, key, std::move(reply));
  state_->settle(now);
}

void Node::send_item(Time now, const CallKey& key, wire::Payload item) {
  state_->send_item(now, key, std::move(item));
  state_->settle(now);
}

void Node::connect(Time now, const std::string& address) {
  state_->connect(now, address);
  state_->settle(now);
}

void Node::listening(std::vector<std::string> addresses) {
  state_->addresses = std::move(addresses);
}

void Node::set_name(const std::string& name) {
  check_name("a peer's name", name);
  if (name == state_->config.name) return;
  if (state_->greeted_anyone) {
    throw Exception(ErrorCode::invalid_argument,
                    "peer '" + state_->config.name +
                        "' cannot change its name: it is connected; call set_name before connect");
  }
  state_->config.name = name;
}

void Node::set_paths(std::vector<wire::PathKind> paths) { state_->config.paths = std::move(paths); }
void Node::set_no_verbs(std::string reason) { state_->config.no_verbs = std::move(reason); }

void Node::define(const std::string& function, const std::string& group) {
  state_->functions[function] = group;
}
void Node::undefine(const std::string& function) { state_->functions.erase(function); }

bool Node::send_service(Time now, const Uid& instance, Service service, wire::Payload payload) {
  const bool sent = state_->send_service(now, instance, service, std::move(payload));
  state_->settle(now);
  return sent;
}

void Node::send_service_to(Time now, const Uid& instance, const std::string& peer, Service service,
                           wire::Payload payload, const std::string& group) {
  state_->send_service_to(now, instance, peer, service, std::move(payload), group);
  state_->settle(now);
}

void Node::send_service_to_name(Time now, const std::string& peer, Service service,
                                wire::Payload payload, const std::string& group) {
  state_->send_service_to_name(now, peer, service, std::move(payload), group);
  state_->settle(now);
}

void Node::close(Time now) {
  state_->close(now);
  state_->settle(now);
}

void Node::opened(Time now, ConnectionId connection, wire::PathKind kind,
                  const wire::PathTraits& traits, const std::string& dialled_address) {
  guard([&] { state_->opened(now, connection, kind, traits, dialled_address); },
        [&](const Error& error) {
          state_->drop_after_opening(now, connection, dialled_address, error);
        });
  state_->settle(now);
}

void Node::turned_away(Time now, const Error& error) { state_->turned_away(now, error); }

void Node::cannot_accept(Time now, const Error& error) { state_->cannot_accept(now, error); }

void Node::dial_failed(Time now, const std::string& address, const Error& error) {
  // It is dialled again even if memory is lacking.
  guard([&] { state_->dial_failed(now, address, error); },
        [&](const Error& lacking) { state_->dial_failed(now, address, lacking); });
  state_->settle(now);
}

void Node::received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame) {
  state_->received(now, connection, frame);
  state_->settle(now);
}

std::span<std::byte> Node::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  Connection* found = state_->find_connection(connection);
  if (found == nullptr || !found->attached) return {};
  std::span<std::byte> target;
  state_->guarded(*found->peer,
                  [&] { target = found->peer->session.chunk_target(connection, head); });
  return target;
}

void Node::chunk_received(Time now, ConnectionId connection, const wire::ChunkHead& head) {
  state_->event_of(now, connection, [&](session::Session& session) {
    session.chunk_received(now, connection, head);
  });
}

void Node::grant_ready(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                       const wire::GrantPlace& place, MutableBuffer memory) {
  state_->event_of(now, connection, [&](session::Session& session) {
    session.grant_ready(now, connection, seq, part, place, std::move(memory));
  });
}

void Node::grant_filled(Time now, ConnectionId connection, std::uint64_t grant) {
  state_->event_of(now, connection, [&](session::Session& session) {
    session.grant_filled(now, connection, grant);
  });
}

bool Node::flushed(const Uid& instance) const {
  const Peer* found = state_->find_peer(instance);
  return found == nullptr || found->flushed();
}

std::optional<ConnectionId> Node::connection_in_use(Time now, const std::string& peer) const {
  const Peer* found = state_->find_peer(peer);
  return found == nullptr ? std::nullopt : found->session.connection_in_use(now);
}

std::optional<ConnectionId> Node::connection_in_use(Time now, const Uid& peer) const {
  const Peer* found = state_->find_peer(peer);
  return found == nullptr ? std::nullopt : found->session.connection_in_use(now);
}

std::optional<session::Session::StandingPlace> Node::take_standing(Time now,
                                                                   const std::string& peer,
                                                                   std::uint64_t bytes) {
  Peer* found = state_->find_peer(peer);
  return found == nullptr ? std::nullopt : found->session.take_standing(now, bytes);
}

std::optional<session::Session::StandingPlace> Node::take_standing(Time now, const Uid& peer,
                                                                   std::uint64_t bytes) {
  Peer* found = state_->find_peer(peer);
  return found == nullptr ? std::nullopt : found->session.take_standing(now, bytes);
}

void Node::release_standing(Time now, ConnectionId connection, std::uint64_t grant) {
  state_->event_of(now, connection,
                   [&](session::Session& session) { session.release_standing(connection, grant); });
}

void Node::end_session(Time now, ConnectionId connection, const Error& reason) {
  state_->event_of(now, connection, [&](session::Session& session) { session.end(reason, false); });
}

void Node::segments_passed(Time now, ConnectionId connection, std::uint64_t seq, bool passed) {
  state_->event_of(now, connection, [&](session::Session& session) {
    session.segments_passed(now, connection, seq, passed);
  });
}

void Node::loan_mapped(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                       Buffer bytes, const Error& error) {
  state_->event_of(now, connection, [&](session::Session& session) {
    session.loan_mapped(now, connection, seq, part, std::move(bytes), error);
  });
}

void Node::return_loans(Time now, const Uid& lender, std::uint64_t session,
                        std::span<const std::uint64_t> loans) {
  state_->return_loans(now, lender, session, loans);
  state_->settle(now);
}

void Node::closed(Time now, ConnectionId connection, const Error& error) {
  state_->closed(now, connection, error);
  state_->settle(now);
}

void Node::writable(Time now, ConnectionId connection) {
  state_->event_of(now, connection,
                   [&](session::Session& session) { session.writable(now, connection); });
}

void Node::fail_peer(Time now, const Uid& instance, const Error& error) {
  state_->break_off(instance, error);
  state_->settle(now);
}

void Node::peer_dead(Time now, const Uid& instance) {
  guard([&] { state_->peer_dead(instance); }, [&](const Error&) { state_->peer_dead(instance); });
  state_->settle(now);
}

Uid Node::instance_of(ConnectionId connection) const {
  const Connection* found = state_->find_connection(connection);
  return found == nullptr || found->peer == nullptr ? Uid{} : found->peer->instance;
}

bool Node::may_concern(const Uid& instance, const std::string& group) const {
  if (instance == state_->config.instance) return true;
  const Peer* peer = state_->find_peer(instance);
  return peer != nullptr && NodeState::may_concern(*peer, group);
}

void Node::tick(Time now) {
  state_->tick(now);
  state_->settle(now);
}

Time Node::next_deadline() const { return state_->timers.next(); }

void Node::drain(std::vector<Action>& into) {
  into.clear();
  into.swap(state_->actions);
}

const std::string& Node::name() const { return state_->config.name; }
const Uid& Node::instance() const { return state_->config.instance; }
std::vector<std::string> Node::addresses() const { return state_->addresses; }
std::vector<PeerInfo> Node::peers(Time now) const { return state_->peers(now); }
Explanation Node::explain(Time now, const std::string& peer) const {
  return state_->explain(now, peer);
}
std::vector<PendingCall> Node::pending_calls(Time now) const { return state_->pending_calls(now); }
std::vector<std::string> Node::searched_names() const { return state_->searched_names(); }

NodeState::NodeState(Config config_of, Allocator& allocator, const Policy& policy,
                     std::uint64_t seed)
    : config(std::move(config_of)),
      allocator_(&allocator),
      policy_(&policy),
      random_(seed),
      dialler_(config.redial_first, config.redial_last) {}

// After an exception the timer is due again with the next tick.
void NodeState::tick(Time now) {
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
    settle(now);  // the next timer must not find what this one has ended
  }
}

void NodeState::due(Time now, const Timer& timer) {
  switch (timer.kind) {
    case Timer::Kind::call:
      return time_out(now, timer.id);
    case Timer::Kind::handler:
      return stop_running({timer.instance, timer.id}, true);
    case Timer::Kind::session: {
      Peer& peer = *find_peer(timer.instance);
      peer.timer = kNever;
      guarded(peer, [&] {
        touch(peer);
        peer.session.tick(now);
        watch_silence(now, peer);
      });
      return;
    }
    case Timer::Kind::greeting:
      return greeting_timed_out(now, timer.id);
    case Timer::Kind::dial:
      return dial_due(now, timer.id);
    case Timer::Kind::search:
      return search_due(now, timer.id);
    case Timer::Kind::close:
      return;  // settle() looks
  }
}

void NodeState::close(Time now) {
  if (closing_) return;
  closing_ = true;
  fail_all_calls();
  searches_.clear();
  close_at_ = now + config.close_within;
  timers.push({close_at_, Timer::Kind::close, 0, {}});
}

// Once replies are sent, or their time is up.
void NodeState::finish_close(Time now) {
  if (!closing_ || closed_) return;
  const auto flushed = [](const auto& entry) { return entry.second->flushed(); };
  if (now < close_at_ && !std::all_of(peers_.begin(), peers_.end(), flushed)) return;
  closed_ = true;
  for (auto& [instance, peer] : peers_) {
    peer->how = Down::closed;
    peer->session.end(make_error(ErrorCode::closed, "peer '" + config.name + "' was closed"), true);
    touch(*peer);
  }
  settle(now);
  while (!connections_.empty()) {
    drop_connection(now, connections_.begin()->first, make_error(ErrorCode::closed, "closed"),
                    true);
  }
  actions.push_back(Closed{});
}

}  // namespace moolink::rpc
