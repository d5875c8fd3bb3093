#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/time.h"
#include "base/uid.h"
#include "wire/path.h"

namespace moolink::rpc {

// Whether a peer with this host key is reachable at the address from here: shared memory and
// loopback only on the same host.
bool reachable(const std::string& address, bool same_host);
bool is_of(const std::string& address, wire::PathKind kind);
// The host of tcp://host:port, in brackets for IPv6; empty: none.
std::string_view host_of(std::string_view address);
// Addresses in the order to try them: shared memory first, the best path between hosts last,
// because it is for peers that are connected already.
void sort_by_preference(std::vector<std::string>& addresses);

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

class Dialler {
 public:
  Dialler(Duration first_pause, Duration last_pause)
      : first_pause_(first_pause), last_pause_(last_pause) {}

  // Adds the address if it is new, due at `when`.
  DialTarget& add(const std::string& address, Time when);
  void remove(const std::string& address) { targets_.erase(address); }
  DialTarget* find(const std::string& address);
  DialTarget* find(std::uint64_t number);
  // How many addresses there are to reach a peer of this name, beside those that the user
  // requested.
  std::size_t count_for(const std::string& peer) const;
  // Whether the user requested this address, and every requested one refuses this peer.
  bool refused_everywhere(const std::string& address);
  DialTarget* of_connection(wire::ConnectionId connection);

  // Its connection has fallen silent: dials a new one beside it.
  void leave(DialTarget& target, Time now);
  void opened(DialTarget& target, wire::ConnectionId connection);
  // The greeting is done: the next pause is short again.
  void succeeded(DialTarget& target, const Uid& instance);
  // The peer there has refused this one; returns the time since the first refusal of the series.
  static Duration refused(DialTarget& target, Time now);
  // The dial failed, or its connection ended.
  void failed(DialTarget& target, Time now);

  std::map<std::string, DialTarget>& targets() { return targets_; }
  const std::map<std::string, DialTarget>& targets() const { return targets_; }

 private:
  Duration first_pause_;
  Duration last_pause_;
  std::uint64_t last_number_ = 0;
  std::map<std::string, DialTarget> targets_;
};

}  // namespace moolink::rpc
