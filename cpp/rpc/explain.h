#pragma once

// What a Node knows, for people: paths with reasons, searches, calls under way.

#include <cstdint>
#include <string>
#include <vector>

#include "base/time.h"
#include "base/uid.h"
#include "wire/path.h"

namespace moolink::rpc {

// An address that was dialled in vain since its last answer.
struct TriedAddress {
  std::string address;
  int tries = 0;
  bool given_up = false;
  std::string error;  // of the last try
};

struct PathState {
  wire::PathKind kind = wire::PathKind::tcp;
  bool live = false;        // a connection of this kind carries messages
  bool in_use = false;      // messages sent now use it
  std::string address;      // of the peer, as dialled; empty: the peer dialled
  std::string cipher;       // of TLS; empty: not encrypted
  Duration silent{};        // live: nothing heard for this long
  Duration round_trip{-1};  // smoothed; negative: not measured
  Duration last_round_trip{-1};
  std::string reason;  // why it is not in use; empty if it is
};

struct Explanation {
  std::string name;
  Uid instance;  // empty: not known
  bool known = false;
  bool connected = false;
  bool suspected = false;
  bool same_host = false;
  std::string reason;            // one sentence on the state
  std::vector<PathState> paths;  // best first
  std::vector<std::string> addresses;
  std::vector<TriedAddress> tried;
  std::vector<std::string> asked;  // peers that were asked for the name
};

// A call of this side without a result yet.
struct PendingCall {
  std::uint64_t id = 0;
  std::string peer;
  std::string function;
  std::string state;  // what it waits for
  Duration age{};
  Time deadline = kNever;
};

}  // namespace moolink::rpc
