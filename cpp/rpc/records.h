#pragma once

// Records of a Node about each peer, connection, call, running handler and search.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/names.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "session/session.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::rpc {

// Lanes from here on belong to services, one each; users' lanes are folded below.
inline constexpr std::uint16_t kServiceLanes = 0xff00;

// Items that a caller may allow at once. A caller that allows more and takes none would make this
// side keep them: only credit holds items back.
inline constexpr std::uint64_t kMostCredit = 1024;

struct WaitingCall {
  CallId id = 0;
  std::uint16_t lane = 0;
};

// How many messages wait in each lane; lane 0 has no order to keep.
class LaneCounts {
 public:
  void add(std::uint16_t lane) { ++counts_[lane]; }
  void remove(std::uint16_t lane) {
    const auto found = counts_.find(lane);
    if (--found->second == 0) counts_.erase(found);
  }
  bool must_wait(std::uint16_t lane) const { return lane != 0 && counts_.contains(lane); }
  void clear() { counts_.clear(); }

 private:
  std::map<std::uint16_t, std::size_t> counts_;
};

struct Peer {
  Peer(session::Config config, Allocator& allocator)
      : instance(config.peer), session(std::move(config), allocator) {}

  Uid instance;
  std::string name;   // known once it is proven
  std::string scope;  // the group that it is confined to; empty: none
  Uid host_key;
  std::vector<std::string> addresses;
  session::Session session;
  bool up = false;                         // PeerUp was emitted, PeerDown not yet
  bool touched = false;                    // its session has actions to carry out
  bool silent = false;                     // its addresses are dialled beside a connection
  bool fallback_told = false;              // logged: a better path was given up, or lost
  bool tells_namesakes = false;            // it answers NamesakesMessage
  std::set<std::string> names_asked = {};  // by it, in such messages
  Tried tried;
  Down how = Down::unreachable;  // for PeerDown
  Time timer = kNever;

  // Its session has ended in `lost`, or must end: there was no memory for that, so the next event
  // retries.
  std::optional<session::Lost> lost;
  bool broken = false;

  // Nothing is in transit to it, as far as there is a path.
  bool flushed() const { return !up || (session.flushed() && queued.empty()); }

  // Refused by the session's window; replies and services first, then calls.
  std::deque<session::OutgoingMessage> queued;
  std::size_t queued_bytes = 0;
  std::deque<WaitingCall> backlog;
  LaneCounts queued_lanes;  // a message overtakes those of other lanes
  LaneCounts backlog_lanes;

  // Its calls to this side, taken and not replied to.
  std::size_t running = 0;
  std::size_t running_bytes = 0;
  bool held = false;                 // told to send no more calls
  bool handlers_held = false;        // HoldHandlers was emitted
  std::size_t calls_since_held = 0;  // that arrived all the same
  std::size_t bytes_since_held = 0;
  std::deque<CallId> early_cancels;  // that overtook their calls
};

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
};

// The items of a stream at its caller.
struct ItemsIn {
  std::uint64_t allowed = 0;
  std::uint64_t told = 0;   // of `allowed`, to the handler
  std::uint64_t taken = 0;  // delivered, in order
  Duration timeout{};       // below zero: none
  std::map<std::uint64_t, wire::Payload> early;
  // The end arrived before the last items.
  std::optional<Reply> end;
  std::uint64_t end_after = 0;
};

// ... and at its handler.
struct ItemsOut {
  std::uint64_t allowed = 0;
  std::uint64_t sent = 0;
};

struct Call {
  enum class State : std::uint8_t { searching, waiting, sent, local };
  State state = State::searching;
  PeerName receiver;
  std::string function;
  wire::Payload arguments;  // until it is sent
  std::uint16_t lane = 0;
  Time deadline = kNever;
  Time started{};
  Uid instance;  // the instance that it waits for, was sent to, or runs at
  std::optional<ItemsIn> stream;
};

// A running handler here.
struct Running {
  Time deadline = kNever;
  std::size_t bytes = 0;
  std::optional<ItemsOut> stream;
};

// A name that no connected peer has yet, or of which it is not certain which peer is meant, with
// the messages and calls that wait for it.
struct Search {
  struct Waiting {
    Time until;
    session::OutgoingMessage message;
    Uid instance;       // for this one only; empty: any peer of the name
    std::string scope;  // of this group, if known
  };
  // The question in which groups there are peers of the name, until all have answered.
  struct Namesakes {
    std::set<Uid> asked;  // and have not answered
    std::set<std::string> groups;
  };
  std::uint64_t number = 0;
  PeerName of;
  std::deque<CallId> calls;
  std::deque<Waiting> services;
  Duration pause{};
  std::set<std::string, std::less<>> asked;  // names of peers
  Tried tried;
  std::optional<Namesakes> namesakes;
  bool found = false;      // a peer knows it
  bool reachable = false;  // ... and an address to try from here
};

// The record of a lost peer, or of an ended search, for explain().
struct Past {
  Time at{};
  std::string ended;  // empty: nothing waited for the name any more
  std::set<std::string, std::less<>> asked;
  Tried tried;
};

}  // namespace moolink::rpc
