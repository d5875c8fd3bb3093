#pragma once

// The configuration of a Node (node.h), the actions it returns, and its reports about peers.

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/time.h"
#include "base/uid.h"
#include "session/session.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::rpc {

using moolink::Down;
using wire::ConnectionId;
using CallId = std::uint64_t;  // unique within the calling instance

// Names one run of a handler: the reply goes to this instance and to no other.
struct CallKey {
  Uid caller;
  CallId id = 0;

  auto operator<=>(const CallKey&) const = default;
};

// The receiver of a message: the peer of a name, which must outlive this, or an instance.
using Receiver = std::variant<const std::string*, Uid>;

using Reply = std::variant<wire::Payload, Error>;

// The addressee of a service message; 1 and 6 are the node's own.
enum class Service : std::uint8_t {
  directory = 1,
  group = 2,  // between a member and its broker
  collective = 3,
  accumulate = 4,
  snapshot = 5,
  namesakes = 6,
};

struct Config {
  Uid instance;
  std::string name;
  Uid host_key;  // boot id and network namespace: equal for peers that share loopback and memory
  std::vector<wire::PathKind> paths = {wire::PathKind::shm, wire::PathKind::tcp};  // enabled here
  wire::Lacking lacking;
  Limits limits;
  session::Timing timing;
  Duration greeting_timeout = seconds(5);
  Duration redial_first = milliseconds(50);  // doubles up to redial_last
  // Less than the time for which a starting broker gathers announcements (BrokerConfig::gather).
  Duration redial_last = milliseconds(750);
  Duration dial_stagger = milliseconds(50);  // between the addresses of one peer
  Duration find_first = milliseconds(20);    // asking again for an unknown name, doubles
  Duration find_last = seconds(1);
  Duration close_within = seconds(1);     // replies are flushed for this long
  std::size_t max_waiting_calls = 65536;  // not yet taken by a session, for one peer
  // Calls of one peer taken but not yet replied to: above this the peer is told to hold its calls.
  std::size_t max_running_calls = 16384;
  std::size_t max_running_bytes = std::size_t{1} << 30;
  // Results and other messages that wait for one peer: above this its calls wait with them.
  std::size_t max_queued_bytes = std::size_t{1} << 30;
};

// ---- actions, to be carried out in order ----

struct Dial {
  std::string address;
};

// The greeting is done; the transport lifts its limits on unauthenticated connections.
struct Establish {
  ConnectionId connection;
  std::uint64_t features;  // those that both peers have
};

struct RunHandler {
  CallKey key;
  std::string caller;  // its name
  std::string function;
  wire::Payload arguments;
  Time deadline;         // kNever: none
  std::uint64_t credit;  // stream items that the caller takes now; 0: it wants one reply
  std::string group;     // whose key the caller holds; empty: this peer's own
};

// The caller of a stream takes items up to this many in all.
struct CreditRaised {
  CallKey key;
  std::uint64_t allowed;
};

// The caller does not wait any more (cancelled, timed out, lost): stop if possible; no reply is
// expected, and a reply would be dropped.
struct CancelHandler {
  CallKey key;
};

// The peer does not take its results as fast as they are made: handlers of its calls that have not
// begun must wait, from `hold` to the one that ends it.
struct HoldHandlers {
  Uid caller;
  bool hold;
};

// Once for every CallId that call() or stream() returned. Of a stream: its end, after all items.
struct Complete {
  CallId id;
  Reply result;
};

// The next item of a stream, in order.
struct StreamItem {
  CallId id;
  wire::Payload item;
};

struct ServiceMessage {
  Uid from;
  std::string from_name;
  Service service;
  wire::Payload payload;
};

struct PeerUp {
  Uid instance;
  std::string name;
  Uid host_key;
  bool same_host;
  std::string scope;  // the group that its key confines it to; empty: none
};

struct PeerDown {
  Uid instance;
  std::string name;
  Down how;
};

// A message to an instance that is not up was dropped: it was not reached for evict_after, or
// another instance has its name.
struct Undelivered {
  Uid instance;
};

// The peer that answers a dial of this side has no key in common with it, or has refused its name
// for so long that another peer of that name must live. `name`: the answering peer's name, if that
// is certain. `only_way`: no peer is connected, and all that the user dials refuse this one.
struct Refused {
  std::string name;
  bool only_way;
  Error error;
};

struct Log {
  LogLevel level;
  std::string text;
};

// close() is done: every reply is sent or its time was up; nothing more will come.
struct Closed {};

using session::AllocateGrant;
using session::CloseConnection;
using session::FillGrant;
using session::MapLoan;
using session::PassSegments;
using session::Write;

using Action = std::variant<Write, RunHandler, Complete, StreamItem, CreditRaised, ServiceMessage,
                            CancelHandler, HoldHandlers, Dial, Establish, CloseConnection,
                            AllocateGrant, FillGrant, PassSegments, MapLoan, PeerUp, PeerDown,
                            Undelivered, Refused, Log, Closed>;

struct PeerInfo {
  Uid instance;
  std::string name;
  std::string scope;  // as of PeerUp
  Uid host_key;
  bool same_host = false;
  bool connected = false;
  bool suspected = false;
  std::vector<wire::PathKind> paths;  // of live connections, the one in use first
  Duration round_trip{-1};            // on the path in use, smoothed; negative: not measured
  Duration last_round_trip{-1};
  Duration silent{};              // nothing heard for this long
  std::size_t calls_waiting = 0;  // of this side, held back by the peer's window
  std::size_t calls_running = 0;  // of the peer, not replied to
  std::vector<std::string> addresses;
  std::uint64_t unacknowledged_bytes = 0;
  std::size_t loans_given = 0;  // to it, and not returned
  std::size_t loans_held = 0;   // of its memory
};

// ---- human-readable reports of a Node: paths with reasons, searches, calls under way

// The failed dials of an address since its last answer.
struct Failures {
  int tries = 0;
  bool given_up = false;
  std::string error;     // of the last try
  bool refused = false;  // the error is the refusal of a peer that answers there
};
using Tried = std::map<std::string, Failures, std::less<>>;

// The error of a dial, with the address once.
inline std::string with_address(const std::string& address, const std::string& error) {
  return error.find(address) == std::string::npos ? address + ": " + error : error;
}

struct PathState : session::LinkInfo {
  bool live = false;    // a connection of this kind carries messages
  std::string address;  // of the peer, as dialled; empty: the peer dialled
  std::string cipher;   // of TLS; empty: not encrypted
  std::string reason;   // why it is not in use; empty if it is
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
  Tried tried;
  std::vector<std::string> asked;  // peers that were asked for the name
};

// A call of this side without a result yet.
struct PendingCall {
  std::uint64_t id = 0;
  std::string peer;
  std::string function;
  std::string state;  // the event it waits for
  Duration age{};
  Time deadline = kNever;
};

}  // namespace moolink::rpc
