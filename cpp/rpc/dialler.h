#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/connection_table.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "wire/path.h"

namespace moolink::rpc {

// An address to dial, again and again with growing pauses.
struct DialTarget {
  enum class State : std::uint8_t { idle, dialling, open };

  std::uint64_t number = 0;
  std::string address;
  bool wanted_by_user = false;  // connect(): while the node lives
  bool better_path = false;     // to a connected peer; given up after a few tries
  std::string peer;             // to reach a peer of this name, if not wanted_by_user
  Uid of;                       // ... this one, if known already
  Uid instance;                 // the peer last met there
  State state = State::idle;
  wire::ConnectionId connection = 0;
  Duration pause{};  // before the next try
  Time next_try = kNever;
  int failures = 0;             // in a row
  bool refused = false;         // the peer there refused the last dial
  Time refused_since = kNever;  // the first refusal of the latest series
  Time refused_at = kNever;     // the last one
  std::string last_error;
  bool error_is_refusal = false;  // last_error is the refusal of a peer that answers there
};

// The addresses that are dialled, and why: the user asked for it, a name is searched, a peer's
// session has no connection, or a better path to a connected peer may exist. Emits Dial when a
// target is due and still needed; the Node reports what became of each dial. Fallbacks to a worse
// path are logged, and what was tried is noted in Peer::tried. The Node owns it; Directory adds the
// addresses that it finds, and Connections tells it of each connection's beginning and end. A
// DialTarget* is valid until remove() of its address, or the next due().
class Dialler {
 public:
  Dialler(Shared& shared, Peers& peers, const ConnectionTable& connections)
      : shared_(shared), peers_(peers), connections_(connections) {}

  // Keeps a connection to the listener there.
  void connect(Time now, const std::string& address);
  // Dials addresses of a searched name: all that can be reached from here, up to a limit.
  void dial_found(Time now, const std::string& name, const std::vector<std::string>& candidates);
  // The addresses that can be tried from here, the best first.
  std::vector<std::string> dialable(std::vector<std::string> candidates, bool same_host) const;
  // Connected, but not by the best path.
  void dial_better_path(Time now, const Peer& peer);
  // The peer has lost its last connection, or all are silent: dials all its addresses anew.
  void redial_peer(Time now, Peer& peer);
  // Redials a peer that has fallen silent beside its connections.
  void watch_silence(Time now, Peer& peer);
  void remove(const std::string& address) { targets_.erase(address); }

  // The target whose timer is due; null: it is being dialled, or gone.
  DialTarget* due(Time now, std::uint64_t number);
  // Dials it if it is still needed; `searched`: something waits for a peer of its name.
  void dial(Time now, DialTarget& target, bool searched);

  DialTarget* find(const std::string& address);
  DialTarget* of_connection(wire::ConnectionId connection);
  const std::map<std::string, DialTarget>& targets() const { return targets_; }
  // The peer last met at the address, or to be reached there; null: none is known.
  Peer* peer_at(const DialTarget& target) const {
    return target.instance.empty() ? peer_of(target) : peers_.find(target.instance);
  }
  // Whether the user requested this address, and every requested one refuses this peer.
  bool refused_everywhere(const std::string& address);

  // A dial has opened the connection.
  static void opened(DialTarget& target, wire::ConnectionId connection);
  // The connection carries messages: the next pause is short again.
  void attached(const Connection& connection, Peer& peer);
  // The peer there has refused this one; returns the time since the first refusal of the series.
  static Duration refused(DialTarget& target, Time now);
  // The dial failed, or its connection ended (`attached`: it had carried messages): dials again.
  // `searched`: where to note failures for a name that no known peer has; may be null. Dialling
  // again matters more than the report of it.
  void failed(Time now, DialTarget& target, const Error& error, bool attached, Tried* searched);

 private:
  DialTarget& add(const std::string& address, Time when);
  void add_target(Time now, const std::string& address, const std::string& name, const Uid& of,
                  Duration delay, bool better_path);
  void arm(const DialTarget& target);
  void leave(DialTarget& target, Time now);
  Peer* peer_of(const DialTarget& target) const {
    return target.of.empty() ? peers_.find(target.peer) : peers_.find(target.of);
  }
  bool needed(Time now, const DialTarget& target, bool searched) const;
  void give_up_better_path(const DialTarget& target);
  void log_lost_path(const DialTarget& target);
  void note_failure(const DialTarget& target, const std::string& error, Tried* searched);

  Shared& shared_;
  Peers& peers_;
  const ConnectionTable& connections_;
  std::uint64_t last_number_ = 0;
  std::map<std::string, DialTarget> targets_;
};

}  // namespace moolink::rpc
