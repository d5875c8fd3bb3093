#pragma once

// The state of one Rpc: its name, the peers, connections, sessions, calls and the directory. A
// machine: events in, actions out; no clock, no I/O, no user code. docs/design/protocol/rpc.md
// holds the tables.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/explain.h"
#include "rpc/policy.h"
#include "session/session.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::rpc {

using wire::ConnectionId;
using CallId = std::uint64_t;  // unique within the calling instance

// Names one run of a handler: the reply goes to this instance and to no other.
struct CallKey {
  Uid caller;
  CallId id = 0;

  auto operator<=>(const CallKey&) const = default;
};

using Reply = std::variant<wire::Payload, Error>;

// The addressee of a service message; 1 is the node's own.
enum class Service : std::uint8_t {
  directory = 1,
  group = 2,  // between a member and its broker
  collective = 3,
  accumulate = 4,
  snapshot = 5,
};

enum class Down : std::uint8_t {
  dead,         // proven: pidfd, refused reconnect, another instance under its name
  unreachable,  // not heard for evict_after, or the session is lost: the peer itself may live
  closed,       // it said CLOSE
};

struct Config {
  Uid instance;
  std::string name;
  Uid host_key;  // boot id and network namespace: equal for peers that share loopback and memory
  std::uint64_t features = 0;
  std::vector<wire::PathKind> paths = {wire::PathKind::shm, wire::PathKind::tcp};  // enabled here
  std::string no_verbs;  // why this machine has no RDMA; empty: it has, or was not checked
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
};

// ---- actions, to be carried out in order ----

struct Dial {
  std::string address;
};

// The greeting is done; the transport lifts its limits on strangers.
struct Establish {
  ConnectionId connection;
};

struct RunHandler {
  CallKey key;
  std::string caller;  // its name
  std::string function;
  wire::Payload arguments;
  Time deadline;         // kNever: none
  std::uint64_t credit;  // stream items that the caller takes now; 0: it wants one reply
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

// The peer that answers a dial of this side has no key in common with it. `name`: the name it
// claims, if any. `only_way`: no peer is connected, nor dialled elsewhere for the user.
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

using Action =
    std::variant<Write, RunHandler, Complete, StreamItem, CreditRaised, ServiceMessage,
                 CancelHandler, Dial, Establish, CloseConnection, AllocateGrant, FillGrant,
                 PassSegments, MapLoan, PeerUp, PeerDown, Undelivered, Refused, Log, Closed>;

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

class NodeState;

class Node {
 public:
  // `allocator` and `policy` outlive the node; `seed` is for random numbers that need no secrecy.
  Node(Config config, Allocator& allocator, const Policy& policy, std::uint64_t seed);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // ---- the user's side ----

  // `timeout` below zero: none. `lane` 0: unordered; calls of another lane start in order at the
  // peer. Errors arrive by Complete, never by exception.
  CallId call(Time now, const std::string& peer, const std::string& function,
              wire::Payload arguments, Duration timeout, std::uint16_t lane);
  // A call whose handler may send many items before its reply, and at most `credit` (above 0) of
  // them ahead of raise_credit(). `timeout`: without an item, while one may come.
  CallId stream(Time now, const std::string& peer, const std::string& function,
                wire::Payload arguments, Duration timeout, std::uint16_t lane,
                std::uint64_t credit);
  // Takes `more` items than allowed so far.
  void raise_credit(Time now, CallId id, std::uint64_t more);
  // Completes the call with ErrorCode::cancelled at once; tells the handler.
  void cancel(Time now, CallId id);
  // Dropped if the caller does not wait any more.
  void reply(Time now, const CallKey& key, Reply reply);
  // An item of a stream, within its credit. Throws Exception{invalid_argument} if it cannot travel.
  void send_item(Time now, const CallKey& key, wire::Payload item);

  // Keeps a connection to the listener there, dialling again whenever it is lost.
  void connect(Time now, const std::string& address);
  // The addresses at which this peer can be dialled, announced to others.
  void listening(std::vector<std::string> addresses);
  // The paths that exist here, for explain().
  void set_paths(std::vector<wire::PathKind> paths);
  void set_no_verbs(std::string reason);
  // Only before the first connection: the name is announced in the greeting. Throws
  // Exception{invalid_argument} later.
  void set_name(const std::string& name);
  // `group`: peers confined to another one cannot call it, nor see that it exists.
  void define(const std::string& function, const std::string& group = {});
  void undefine(const std::string& function);
  // Reliable and in order for one (sender, receiver, service) while both live. False: no such peer
  // is up; the message is dropped.
  bool send_service(Time now, const Uid& instance, Service service, wire::Payload payload);
  // The same; while that instance is not up it is searched by its name, and the message waits for
  // evict_after at most, then Undelivered follows. Another peer of the name does not get it.
  // `group`: the message's group; peers confined to another one are not asked for the name.
  void send_service_to(Time now, const Uid& instance, const std::string& peer, Service service,
                       wire::Payload payload, const std::string& group = {});
  // Finds and dials the peer if necessary; kept while the name is unknown, for at most evict_after.
  void send_service_to_name(Time now, const std::string& peer, Service service,
                            wire::Payload payload, const std::string& group = {});
  // Fails this side's calls with ErrorCode::closed, flushes replies, says CLOSE; ends in Closed.
  void close(Time now);

  // ---- the network's side ----

  // dialled_address: as in Dial; empty for an accepted connection.
  void opened(Time now, ConnectionId connection, wire::PathKind kind,
              const wire::PathTraits& traits, const std::string& dialled_address);
  // code peer_lost: no listener there, which on the peer's host proves that it is gone.
  void dial_failed(Time now, const std::string& address, const Error& error);
  // The path refused a peer that tried to connect.
  void turned_away(Time now, const Error& error);
  // A peer tries to connect, and this process has no descriptor or memory for it.
  void cannot_accept(Time now, const Error& error);
  void received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame);
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head);
  void chunk_received(Time now, ConnectionId connection, const wire::ChunkHead& head);
  void grant_ready(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                   const wire::GrantPlace& place, MutableBuffer memory);
  void grant_filled(Time now, ConnectionId connection, std::uint64_t grant);
  // See session::Session.
  void segments_passed(Time now, ConnectionId connection, std::uint64_t seq, bool passed);
  void loan_mapped(Time now, ConnectionId connection, std::uint64_t seq, std::uint32_t part,
                   Buffer bytes, const Error& error);
  void return_loans(Time now, const Uid& lender, std::uint64_t session,
                    std::span<const std::uint64_t> loans);
  // For a message to a peer of that name, or to that instance. See session::Session.
  std::optional<ConnectionId> connection_in_use(Time now, const std::string& peer) const;
  std::optional<ConnectionId> connection_in_use(Time now, const Uid& peer) const;
  std::optional<session::Session::StandingPlace> take_standing(Time now, const std::string& peer,
                                                               std::uint64_t bytes);
  std::optional<session::Session::StandingPlace> take_standing(Time now, const Uid& peer,
                                                               std::uint64_t bytes);
  void release_standing(Time now, ConnectionId connection, std::uint64_t grant);
  void closed(Time now, ConnectionId connection, const Error& error);
  // A frame of the session cannot be sent on any path: the session ends, for that reason.
  void end_session(Time now, ConnectionId connection, const Error& reason);
  void writable(Time now, ConnectionId connection);
  // Every message sent to the instance has arrived, or it is not connected.
  bool flushed(const Uid& instance) const;
  // An action from or for that peer failed, whatever the path: the session with it ends at both
  // ends, for that reason.
  void fail_peer(Time now, const Uid& instance, const Error& error);
  // Proof that the process of the instance has ended.
  void peer_dead(Time now, const Uid& instance);
  // The instance at the other end of a connection; empty while it is not known.
  Uid instance_of(ConnectionId connection) const;
  // Whether the peer may take part in the group's traffic: it has proven the job's token, or that
  // group's key. This peer always may.
  bool may_concern(const Uid& instance, const std::string& group) const;

  void tick(Time now);
  Time next_deadline() const;

  // The actions since the last call; the vector's memory is used again.
  void drain(std::vector<Action>& into);

  const std::string& name() const;
  const Uid& instance() const;
  std::vector<std::string> addresses() const;
  std::vector<PeerInfo> peers(Time now) const;
  // How a peer is reached, or why it is not.
  Explanation explain(Time now, const std::string& peer) const;
  std::vector<PendingCall> pending_calls(Time now) const;  // in order of their start
  std::vector<std::string> searched_names() const;

 private:
  std::unique_ptr<NodeState> state_;
};

}  // namespace moolink::rpc
