#pragma once

// The Node's state and behaviour; node.h is its interface. Every event ends in settle(), which
// turns the actions of the sessions it touched into the Node's.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/barrier.h"
#include "rpc/complaints.h"
#include "rpc/dialler.h"
#include "rpc/messages.h"
#include "rpc/node.h"
#include "rpc/timers.h"

namespace moolink::rpc {

// Lanes from here on belong to services, one each; users' lanes are folded below.
inline constexpr std::uint16_t kServiceLanes = 0xff00;

// Items that a caller may allow at once. A caller that allows more and takes none would make this
// side keep them: only credit holds items back.
inline constexpr std::uint64_t kMostCredit = 1024;

// Addresses dialled in vain, by address.
using Tried = std::map<std::string, TriedAddress, std::less<>>;

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
  bool up = false;             // PeerUp was emitted, PeerDown not yet
  bool touched = false;        // its session has actions to carry out
  bool silent = false;         // its addresses are dialled beside a connection
  bool fallback_told = false;  // logged: a better path was given up, or lost
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
  Peer* peer = nullptr;   // whose session carries it
  std::string scope;      // of the key that was proven
  bool proven = false;    // the other side has proven that it may connect
  bool attached = false;  // carries messages

  wire::Channel channel() const { return {kind, traits.binding}; }
};

// Why a connection is refused.
struct Objection {
  enum class Why : std::uint8_t {
    version,         // it speaks another one
    itself,          // the dialler reached itself: not reported to the user
    name_taken,      // by a peer that answers
    name_may_be,     // by a peer heard a moment ago: the other side dials again
    not_authorised,  // it has not proven that it may connect
  };
  Why why;
  std::string text;
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
  std::string peer;
  std::string function;
  wire::Payload arguments;  // until it is sent
  std::uint16_t lane = 0;
  Time deadline = kNever;
  Time started{};
  Uid instance;  // the instance it was sent to
  std::optional<ItemsIn> stream;
};

// A running handler here.
struct Running {
  Time deadline = kNever;
  std::size_t bytes = 0;
  std::optional<ItemsOut> stream;
};

struct CallKeyHash {
  std::size_t operator()(const CallKey& key) const {
    return static_cast<std::size_t>((key.caller.low ^ key.id) * 0x9e3779b97f4a7c15ULL);
  }
};

// A name that no connected peer has yet, with the messages and calls that wait for it.
struct Search {
  struct Waiting {
    Time until;
    Service service;
    wire::Payload payload;
    Uid instance;       // for this one only; empty: any peer of the name
    std::string scope;  // of this group, if known
  };
  std::uint64_t number = 0;
  std::string name;
  std::deque<CallId> calls;
  std::deque<Waiting> services;
  Duration pause{};
  Time next_find = kNever;
  std::set<std::string, std::less<>> asked;  // names of peers
  Tried tried;
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

class NodeState {
 public:
  NodeState(Config config, Allocator& allocator, const Policy& policy, std::uint64_t seed);

  // calls.cc
  // Throws std::bad_alloc if it could not even begin.
  CallId call(Time now, const std::string& peer, const std::string& function,
              wire::Payload arguments, Duration timeout, std::uint16_t lane, std::uint64_t credit);
  void cancel(Time now, CallId id);
  void reply(Time now, const CallKey& key, Reply reply);

  // streams.cc
  void raise_credit(Time now, CallId id, std::uint64_t more);
  void send_item(Time now, const CallKey& key, wire::Payload item);

  // connections.cc
  void opened(Time now, ConnectionId connection, wire::PathKind kind,
              const wire::PathTraits& traits, const std::string& dialled_address);
  void received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame);
  void closed(Time now, ConnectionId connection, const Error& error);
  void drop_after_opening(Time now, ConnectionId id, const std::string& dialled,
                          const Error& error);
  void turned_away(Time now, const Error& error);
  void cannot_accept(Time now, const Error& error) { warn_once(now, error.message); }
  Connection* find_connection(ConnectionId id);
  Peer* find_peer(const Uid& instance) const;
  // Scopes distinguish equal names; without one, a peer of the whole job before others.
  Peer* find_peer(const std::string& name) const;
  Peer* find_peer(const std::string& name, const std::string& scope) const;

  // directory.cc
  void connect(Time now, const std::string& address);
  void dial_failed(Time now, const std::string& address, const Error& error);

  // peers.cc
  // The exception barrier: an exception of `work` ends the peer's session, here and at the peer.
  template <class Work>
  bool guarded(Peer& peer, Work&& work) {
    if (guard(work, [&](const Error& error) { break_off(peer, error); })) return true;
    if (!peer.session.ended()) peer.broken = any_broken_ = true;
    return false;
  }
  // An event of the connection's peer, if it carries messages.
  template <class Work>
  void event_of(Time now, ConnectionId id, Work&& work) {
    Connection* found = find_connection(id);
    if (found == nullptr || !found->attached) return;
    Peer& peer = *found->peer;
    guarded(peer, [&] {
      touch(peer);
      work(peer.session);
    });
    settle(now);
  }
  void break_off(Peer& peer, const Error& error);
  void break_off(const Uid& instance, const Error& error);
  bool send_service(Time now, const Uid& instance, Service service, wire::Payload payload);
  void send_service_to(Time now, const Uid& instance, const std::string& peer, Service service,
                       wire::Payload payload, const std::string& scope);
  void send_service_to_name(Time now, const std::string& peer, Service service,
                            wire::Payload payload, const std::string& scope);
  void peer_dead(const Uid& instance);
  void return_loans(Time now, const Uid& lender, std::uint64_t session,
                    std::span<const std::uint64_t> loans);
  // Whether a peer may take part in a group's traffic: one confined to another group may not.
  static bool may_concern(const Peer& peer, const std::string& group) {
    return peer.scope.empty() || group.empty() || peer.scope == group;
  }
  void touch(Peer& peer);
  void settle(Time now);
  std::vector<PeerInfo> peers(Time now) const;

  // explain.cc
  Explanation explain(Time now, const std::string& name) const;
  std::vector<PendingCall> pending_calls(Time now) const;
  std::vector<std::string> searched_names() const;

  // node.cc
  void tick(Time now);
  void close(Time now);

  Config config;
  std::vector<std::string> addresses;
  std::map<std::string, std::string, std::less<>> functions;  // and the group that may call each
  std::vector<Action> actions;
  TimerQueue timers;
  bool greeted_anyone = false;  // the name was announced

 private:
  // calls.cc
  void begin_call(Time now, CallId id, Call& call);
  void run_locally(CallId id, Call& call);
  void dispatch(Time now, Peer& peer, CallId id, Call& call);
  bool transmit_call(Time now, Peer& peer, CallId id, Call& call);
  void complete(CallId id, Reply result);
  void stop_handler(Time now, CallId id, const Call& call);
  void time_out(Time now, CallId id);
  std::string why_unreached(const std::string& peer) const;
  void fail_all_calls();
  void fail_calls_of(const Peer& peer, const session::Lost& lost);
  void delivered_call(Time now, Peer& peer, session::Deliver& delivered);
  void delivered_result(Peer& peer, session::Deliver& delivered);
  void delivered_cancel(Peer& peer, session::Deliver& delivered);
  void send_result(Time now, Peer& peer, CallId id, Reply reply, std::uint64_t items = 0);
  void stop_running(const CallKey& key, bool tell_handler);
  void stop_all_of(const Uid& caller);
  void balance_window(Time now, Peer& peer);
  bool ignores_window(Peer& peer, std::size_t bytes) const;

  // streams.cc
  void await_items(Time now, CallId id, Call& call);
  void tell_credit(Time now, CallId id, Call& call);
  void delivered_item(Time now, Peer& peer, session::Deliver& delivered);
  void delivered_credit(const Peer& peer, session::Deliver& delivered);
  void take_item(Time now, CallId id, Call& call, std::uint64_t number, wire::Payload item);
  void end_stream(CallId id, Call& call, Reply end, std::uint64_t items);
  void take_credit(const CallKey& key, std::uint64_t allowed);

  // connections.cc
  wire::Hello hello();
  void greet(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  void answer(Time now, Connection& connection);
  void answered(Time now, Connection& connection);
  void welcomed(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  void refused(Time now, Connection& connection, const wire::Refuse& refusal);
  bool enter(Time now, Connection& connection);
  static std::optional<Objection> objection(const wire::Hello& ours, const wire::Hello& theirs);
  std::optional<Objection> objection_to_name(Time now, const Connection& connection) const;
  void adopt(Connection& connection, const wire::Hello& theirs);
  void refuse(Time now, Connection& connection, const Objection& objection);
  void warn_once(Time now, const std::string& text);
  static bool tells_callers(const Connection& connection);
  void fail_callers(const std::string& address, const std::string& name, Error error);
  void drop_connection(Time now, ConnectionId id, const Error& error, bool tell_transport);
  void redial(Time now, DialTarget& target, const Error& error, bool attached);
  void disconnected_from(Time now, Peer& peer);
  void greeting_timed_out(Time now, ConnectionId id);
  void log(LogLevel level, std::string text);
  void complain(Time now, std::string text);  // about a stranger

  // peers.cc
  Peer& ensure_peer(const Uid& instance);
  void settle_peer(Time now, Peer& peer);
  void perform(Time now, Peer& peer, session::Action& action);
  void attached(Time now, Peer& peer, ConnectionId connection);
  void rdma_works(DialTarget& target, Peer& peer);
  void deliver(Time now, Peer& peer, session::Deliver& delivered);
  void lost(Time now, Peer& peer);
  void end_peer(Peer& peer, Down how, const std::string& why);
  void mend(Time now);
  void forget_if_gone(Peer& peer);
  void send_or_queue(Time now, Peer& peer, session::OutgoingMessage message);
  void send_checked(Time now, Peer& peer, session::OutgoingMessage message);
  void queue(Peer& peer, session::OutgoingMessage message);
  void send_to(Time now, Peer& peer, Service service, wire::Payload payload);
  void flush(Time now, Peer& peer);
  void arm(Peer& peer);
  void due(Time now, const Timer& timer);
  bool counts(const Timer& timer) const;

  // directory.cc
  Search& search_for(Time now, const std::string& name);
  void keep_for(Time now, const std::string& name, Search::Waiting waiting);
  bool may_ask(const Peer& peer, const Search& search) const;
  Peer* peer_of(const DialTarget& target) const;
  void ask_everybody(Time now, Search& search);
  void ask(Time now, Peer& peer, const std::string& name);
  void search_due(Time now, std::uint64_t number);
  void end_search(Time now, Peer& peer);
  void drop_overdue(Time now, Search& search);
  void undelivered(const Uid& instance);
  void directory_message(Time now, Peer& from, const wire::Payload& payload);
  void found(Time now, const Peer& from, const Found& found);
  void dial_peer(Time now, const Peer& peer);
  void dial_better_path(Time now, const Peer& peer);
  std::vector<std::string> dialable(std::vector<std::string> candidates, bool same_host) const;
  void add_target(Time now, const std::string& address, const std::string& name, const Uid& of,
                  Duration delay, bool better_path);
  void arm(const DialTarget& target);
  void dial_due(Time now, std::uint64_t number);
  bool needed(Time now, const DialTarget& target) const;
  bool answers(Time now, const Peer* peer) const;
  void watch_silence(Time now, Peer& peer);
  void give_up_better_path(DialTarget& target);
  void tell_of_lost_path(const DialTarget& target);
  void note_failure(const DialTarget& target, const std::string& error);
  void remember(Time now, const std::string& name, Past past);
  void finish_close(Time now);

  // explain.cc
  void explain_peer(Time now, const Peer& peer, Explanation& explanation) const;
  void explain_absence(Time now, const std::string& name, Explanation& explanation) const;
  PathState explain_path(wire::PathKind kind, const Peer& peer,
                         const std::vector<session::LinkInfo>& links) const;
  std::string why_not_live(const PathState& path, const Peer& peer) const;

  Allocator* allocator_;
  const Policy* policy_;
  Random random_;

  std::map<ConnectionId, Connection> connections_;
  std::map<Uid, std::unique_ptr<Peer>> peers_;
  // Of peers that have proven themselves: name and scope.
  std::map<std::pair<std::string, std::string>, Uid> names_;
  std::uint64_t peers_made_ = 0;
  std::deque<Peer*> touched_;
  std::vector<session::Action> session_actions_;

  CallId last_call_ = 0;
  std::unordered_map<CallId, Call> calls_;                     // looked up, never walked in order
  std::unordered_map<CallKey, Running, CallKeyHash> running_;  // likewise

  Dialler dialler_;
  std::uint64_t greetings_ = 0;
  std::string last_warning_;
  Time warned_at_{};
  std::uint64_t last_search_ = 0;
  std::map<std::string, Search, std::less<>> searches_;
  std::map<std::string, Past, std::less<>> past_;  // a few
  Complaints complaints_;

  bool any_broken_ = false;
  bool closing_ = false;
  bool closed_ = false;
  Time close_at_ = kNever;
};

}  // namespace moolink::rpc
