#include "rpc/node.h"

#include <algorithm>
#include <utility>

#include "base/names.h"

namespace moolink::rpc {

Node::Node(Config config, Allocator& allocator, const Authenticator& authenticator)
    : config_(std::move(config)),
      allocator_(&allocator),
      authenticator_(&authenticator),
      dialler_(config_.redial_first, config_.redial_last) {}

void Node::set_name(const std::string& name) {
  check_name("a peer's name", name);
  if (name == config_.name) return;
  if (greeted_anyone_) {
    throw Exception(ErrorCode::invalid_argument,
                    "peer '" + config_.name +
                        "' cannot change its name: it is connected; call set_name before connect");
  }
  config_.name = name;
}

std::span<std::byte> Node::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  Connection* found = find_connection(connection);
  if (found == nullptr || !found->attached) return {};
  std::span<std::byte> target;
  Peer& peer = *found->peer;
  guarded(peer, [&] {
    target = peer.session.chunk_target(connection, head);
    if (!peer.session.has(connection)) touch(peer);  // it has broken the protocol
  });
  return target;
}

bool Node::flushed(const Uid& instance) const {
  const Peer* found = find_peer(instance);
  return found == nullptr || found->flushed();
}

Uid Node::instance_of(ConnectionId connection) const {
  const auto found = connections_.find(connection);
  const bool known = found != connections_.end() && found->second.peer != nullptr;
  return known ? found->second.peer->instance : Uid{};
}

bool Node::may_concern(const Uid& instance, const std::string& group) const {
  if (instance == config_.instance) return true;
  const Peer* peer = find_peer(instance);
  return peer != nullptr && may_concern(*peer, group);
}

bool Node::is_certain_alone(const Uid& instance, const PeerName& member) const {
  if (instance == config_.instance) return true;
  if (const Peer* peer = find_peer(instance); peer != nullptr && peer->up) {
    return peer->scope.empty();
  }
  const Peer* namesake = find_peer(member.name, member.group);
  return namesake != nullptr && namesake->up;
}

// After an exception the timer is due again with the next tick.
void Node::tick(Time now) {
  while (!timers_.empty() && timers_.next() <= now) {
    const Timer timer = timers_.top();
    timers_.pop();
    if (!counts(timer)) continue;
    try {
      due(now, timer);
    } catch (...) {
      timers_.push(timer);
      throw;
    }
    settle(now);  // the next timer must not find anything that this one has ended
  }
  settle(now);
}

void Node::due(Time now, const Timer& timer) {
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
    case Timer::Kind::greeting: {
      const std::string& dialled = connections_.at(timer.id).dialled;
      const std::string where = dialled.empty() ? "a connection" : dialled;
      return drop_connection(now, timer.id,
                             make_error(ErrorCode::timeout, where + " did not answer the greeting"),
                             true);
    }
    case Timer::Kind::dial:
      return dial_due(now, timer.id);
    case Timer::Kind::search:
      return search_due(now, timer.id);
    case Timer::Kind::close:
      return;  // settle() looks
  }
}

void Node::close(Time now) {
  if (closing_) return;
  closing_ = true;
  fail_all_calls();
  searches_.clear();
  close_at_ = now + config_.close_within;
  timers_.push({close_at_, Timer::Kind::close, 0, {}});
  settle(now);
}

// Once replies are sent, or their time is up.
void Node::finish_close(Time now) {
  if (!closing_ || closed_) return;
  const auto flushed = [](const auto& entry) { return entry.second->flushed(); };
  if (now < close_at_ && !std::ranges::all_of(peers_, flushed)) return;
  closed_ = true;
  for (auto& [instance, peer] : peers_) {
    peer->how = Down::closed;
    peer->session.end(make_error(ErrorCode::closed, "peer '" + config_.name + "' was closed"),
                      true);
    touch(*peer);
  }
  settle(now);
  while (!connections_.empty()) {
    drop_connection(now, connections_.begin()->first, make_error(ErrorCode::closed, "closed"),
                    true);
  }
  actions_.push_back(Closed{});
}

}  // namespace moolink::rpc
