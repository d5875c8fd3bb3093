#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/peers.h"
#include "wire/frame.h"
#include "wire/path.h"

namespace moolink::rpc {

// A connection, from its opening on.
struct Connection {
  ConnectionId id = 0;
  wire::PathKind kind = wire::PathKind::tcp;
  wire::PathTraits traits;
  std::string dialled;  // address; empty: accepted
  wire::Hello ours;
  std::optional<wire::Hello> theirs;
  Peer* peer = nullptr;    // whose session carries it
  std::string scope;       // of the key that was proven
  bool proven = false;     // the other side has proven that it may connect
  bool attached = false;   // carries messages
  bool to_itself = false;  // this node has accepted its own dial

  wire::Channel channel() const { return {kind, traits.binding}; }
  // What both sides know of optional features.
  std::uint64_t features() const { return ours.features & theirs->features; }
};

// The open connections by their id. Connections opens and ends them; the others look them up. A
// Connection* is valid until its end.
class ConnectionTable {
 public:
  Connection& add(ConnectionId id) { return connections_[id]; }
  void erase(ConnectionId id) { connections_.erase(id); }
  // Null: it has ended.
  Connection* find(ConnectionId id) {
    const auto found = connections_.find(id);
    return found == connections_.end() ? nullptr : &found->second;
  }
  const Connection* find(ConnectionId id) const {
    return const_cast<ConnectionTable*>(this)->find(id);
  }
  // One that carries messages, or null.
  Connection* find_attached(ConnectionId id) {
    Connection* found = find(id);
    return found == nullptr || !found->attached ? nullptr : found;
  }
  // Whether that holds for a connection of the peer, which has proven itself on it.
  template <class Holds>
  bool any_of(const Peer& peer, Holds holds) const {
    return std::ranges::any_of(connections_, [&](const auto& entry) {
      return entry.second.peer == &peer && holds(entry.second);
    });
  }
  std::map<ConnectionId, Connection>& all() { return connections_; }
  const std::map<ConnectionId, Connection>& all() const { return connections_; }
  bool counts(const Timer& timer) const {  // of the greeting
    const Connection* found = find(timer.id);
    return found != nullptr && !found->attached;
  }

 private:
  std::map<ConnectionId, Connection> connections_;
};

}  // namespace moolink::rpc
