#pragma once

// The state of one Rpc: its name, the peers, connections, sessions, calls and the directory. A
// machine: events in, actions out; no clock, no I/O, no user code. docs/design/protocol/rpc.md
// holds the tables. Every event ends in settle(), which turns the actions of the sessions it
// touched into the Node's.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/barrier.h"
#include "base/buffer.h"
#include "base/names.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/authenticator.h"
#include "rpc/dialler.h"
#include "rpc/log_limit.h"
#include "rpc/messages.h"
#include "rpc/records.h"
#include "rpc/timers.h"
#include "session/session.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::rpc {

// Why a call by name fails: several groups have a peer of that name.
std::string several_of(const std::string& name, const std::set<std::string>& groups);

class Node {
 public:
  // `allocator` and `authenticator` outlive the node.
  Node(Config config, Allocator& allocator, const Authenticator& authenticator);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  // ---- the user's side ----

  // `timeout` below zero: none. `lane` 0: unordered; calls of another lane start in order at the
  // peer. `credit` above 0: a stream; its handler may send many items before its reply, at most
  // `credit` of them ahead of raise_credit(), and `timeout` is that without an item, while one may
  // come. `peer`: a name, or join_names({group, name}) for the peer of that group, or of the whole
  // job if the group has none. Errors arrive by Complete; throws std::bad_alloc if it could not
  // even begin.
  CallId call(Time now, const std::string& peer, const std::string& function,
              wire::Payload arguments, Duration timeout, std::uint16_t lane,
              std::uint64_t credit = 0);
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
  // This peer can be dialled at these addresses, too: they are announced to others.
  void listening(const std::vector<std::string>& addresses) {
    addresses_.insert(addresses_.end(), addresses.begin(), addresses.end());
  }
  const std::vector<std::string>& addresses() const { return addresses_; }
  // The paths that exist here, and for explain() the reasons why others do not.
  void set_paths(std::vector<wire::PathKind> paths, wire::Lacking lacking = {}) {
    config_.paths = std::move(paths);
    config_.lacking = std::move(lacking);
  }
  // Only before the first connection: the name is announced in the greeting. Throws
  // Exception{invalid_argument} later.
  void set_name(const std::string& name);
  // `group`: peers confined to another one cannot call it, nor see that it exists.
  void define(const std::string& function, const std::string& group = {}) {
    functions_[function] = group;
  }
  void undefine(const std::string& function) { functions_.erase(function); }
  // Reliable and in order for one (sender, receiver, service) while both live. While that instance
  // (empty: any peer of the name) is not up, this searches for its name, and the message waits for
  // evict_after at most; then Undelivered follows. Another peer of the name does not get it.
  // `group`: the message's group; peers confined to another one are not asked for the name.
  void send_service_to(Time now, const Uid& instance, const std::string& peer, Service service,
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
  void cannot_accept(Time now, const Error& error) { warn_once(now, error.message); }
  void received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame);
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head);
  // An event of the connection for its session, if it carries messages:
  // event(&session::Session::grant_filled, now, connection, grant).
  template <class... More>
  void event(void (session::Session::*what)(Time, ConnectionId, More...), Time now, ConnectionId id,
             std::type_identity_t<More>... more) {
    Connection* found = find_connection(id);
    if (found == nullptr || !found->attached) return;
    Peer& peer = *found->peer;
    guarded(peer, [&] {
      touch(peer);
      (peer.session.*what)(now, id, std::forward<More>(more)...);
    });
    settle(now);
  }
  void return_loans(Time now, const Uid& lender, std::uint64_t session,
                    std::span<const std::uint64_t> loans);
  // For its connection in use and its standing grants; null: the peer is not known.
  session::Session* session_with(const Receiver& receiver) const {
    Peer* peer = find_peer(receiver);
    return peer == nullptr ? nullptr : &peer->session;
  }
  void closed(Time now, ConnectionId connection, const Error& error);
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
  // Whether calls reach that member of a group by its name alone, and no other peer of the name: it
  // is up and holds the token. One that is not up may hold either key; by its name with the group,
  // no peer of another group is taken for it. Unless a holder of the group's key has the name:
  // by the name alone, that one is not taken for it as long as another peer knows the member.
  bool is_certain_alone(const Uid& instance, const PeerName& member) const;

  void tick(Time now);
  Time next_deadline() const { return timers_.next(); }

  // The actions since the last call; the vector's memory is used again.
  void drain(std::vector<Action>& into) {
    into.clear();
    into.swap(actions_);
  }

  const std::string& name() const { return config_.name; }
  const Uid& instance() const { return config_.instance; }
  std::vector<PeerInfo> peers(Time now) const;
  // How a peer is reached, or why it is not.
  Explanation explain(Time now, const std::string& peer) const;
  std::vector<PendingCall> pending_calls(Time now) const;  // in order of their start
  std::vector<std::string> searched_names() const;

 private:
  // calls.cc
  void begin_call(Time now, CallId id, Call& call);
  void run_locally(CallId id, Call& call);
  void dispatch(Time now, Peer& peer, CallId id, Call& call);
  bool transmit_call(Time now, Peer& peer, CallId id, Call& call);
  void complete(CallId id, Reply result);
  void stop_handler(Time now, CallId id, const Call& call);
  void time_out(Time now, CallId id);
  std::string why_unreached(const PeerName& peer) const;
  void fail_all_calls();
  void fail_calls_of(const Peer& peer, const session::Lost& lost);
  void delivered_call(Time now, Peer& peer, session::Deliver& delivered);
  void delivered_result(Peer& peer, session::Deliver& delivered);
  void delivered_cancel(Peer& peer, session::Deliver& delivered);
  void send_result(Time now, Peer& peer, CallId id, Reply reply, std::uint64_t items = 0);
  void stop_running(const CallKey& key, bool tell_handler);
  void stop_all_of(const Uid& caller);
  void balance_window(Time now, Peer& peer);
  void balance_handlers(Peer& peer);
  bool ignores_window(Peer& peer, std::size_t bytes) const;

  // namesakes.cc
  // The peer that a call goes to at once; null: it is not up, or not certain yet.
  Peer* receiver_of(const PeerName& of) const;
  // Whether a call by that name runs here.
  bool means_this(const PeerName& of) const;
  std::set<std::string> groups_of(const std::string& name) const;
  void resume_calls(Time now, Search& search);
  void decide(Time now, Search& search);
  void fail(Search& search, const std::string& why);
  void ask_namesakes(Time now, Search& search);
  void tell_namesakes(Time now, Peer& to, const std::string& name);
  void namesakes_message(Time now, Peer& from, const wire::Payload& payload);
  void forget_meanings(const std::string& name, const std::string& group);
  void met(Time now, Peer& peer);

  // streams.cc
  void await_items(Time now, CallId id, Call& call);
  void tell_credit(Time now, CallId id, Call& call);
  void delivered_item(Time now, Peer& peer, session::Deliver& delivered);
  void delivered_credit(const Peer& peer, session::Deliver& delivered);
  void take_item(Time now, CallId id, Call& call, std::uint64_t number, wire::Payload item);
  void end_stream(CallId id, Call& call, Reply end, std::uint64_t items);
  void take_credit(const CallKey& key, std::uint64_t allowed);

  // connections.cc
  void open(Time now, ConnectionId id, wire::PathKind kind, const wire::PathTraits& traits,
            const std::string& dialled);
  void drop_after_opening(Time now, ConnectionId id, const std::string& dialled,
                          const Error& error);
  Connection* find_connection(ConnectionId id);
  wire::Hello hello();
  void greet(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  void answer(Time now, Connection& connection);
  void answered(Time now, Connection& connection);
  void welcomed(Time now, Connection& connection, const wire::ReceivedFrame& frame);
  void refused(Time now, Connection& connection, const wire::Refuse& refusal);
  void note_own_dial(const wire::Hello& hello);
  bool enter(Time now, Connection& connection);
  Error objection_to_name(Time now, const Connection& connection) const;
  void adopt(Connection& connection, const wire::Hello& theirs);
  void refuse(Time now, Connection& connection, Error error);
  void drop_refused(Time now, Connection& connection, std::string name, const Error& error,
                    bool final);
  void warn_once(Time now, const std::string& text);
  void fail_callers(Time now, const std::string& address, const std::string& name, Error error);
  void drop_connection(Time now, ConnectionId id, const Error& error, bool tell_transport);
  void redial(Time now, DialTarget& target, const Error& error, bool attached);
  void disconnected_from(Time now, Peer& peer);
  void log(LogLevel level, std::string text) { actions_.push_back(Log{level, std::move(text)}); }
  // About an unauthenticated connection.
  void log_limited(Time now, std::string text) {
    auto line = log_limit_.line(now, std::move(text));
    if (line) log(LogLevel::warning, std::move(*line));
  }

  // peers.cc
  // The exception barrier: an exception of `work` ends the peer's session, here and at the peer.
  template <class Work>
  bool guarded(Peer& peer, Work&& work) {
    if (guard(work, [&](const Error& error) { break_off(peer, error); })) return true;
    if (!peer.session.ended()) peer.broken = any_broken_ = true;
    return false;
  }
  void break_off(Peer& peer, const Error& error);
  void touch(Peer& peer);
  void settle(Time now);
  // Whether a peer may take part in a group's traffic: one confined to another group may not.
  static bool may_concern(const Peer& peer, const std::string& group) {
    return peer.scope.empty() || group.empty() || peer.scope == group;
  }
  Peer* find_peer(const Uid& instance) const;
  // Scopes distinguish equal names; without one, a peer of the whole job before others. For calls,
  // see receiver_of().
  Peer* find_peer(const std::string& name) const;
  Peer* find_peer(const std::string& name, const std::string& scope) const;
  Peer* find_peer(const Receiver& receiver) const;
  bool any_peer_is_up() const {
    return std::ranges::any_of(peers_, [](const auto& entry) { return entry.second->up; });
  }
  Peer& ensure_peer(const Uid& instance);
  void settle_peer(Time now, Peer& peer);
  void perform(Time now, Peer& peer, session::Action& action);
  void attached(Time now, Peer& peer, ConnectionId connection);
  void best_path_works(DialTarget& target, Peer& peer);
  void deliver(Time now, Peer& peer, session::Deliver& delivered);
  void lost(Time now, Peer& peer);
  void end_peer(Peer& peer, Down how, const std::string& why);
  void mend(Time now);
  void forget_if_gone(Peer& peer);
  void send_or_queue(Time now, Peer& peer, session::OutgoingMessage message);
  void queue(Peer& peer, session::OutgoingMessage message);
  void send_to(Time now, Peer& peer, Service service, wire::Payload payload);
  void flush(Time now, Peer& peer);
  void arm(Peer& peer);
  void due(Time now, const Timer& timer);
  bool counts(const Timer& timer) const;
  // A timer in the queue no longer counts.
  void forget_timer() {
    timers_.forget([this](const Timer& timer) { return counts(timer); });
  }

  // directory.cc
  void dial_ended(Time now, const std::string& address, const Error& error);
  Search& search_for(Time now, const PeerName& of);
  // Something waits for a peer of the name.
  const Search* find_search(const std::string& name) const {
    const auto found = searches_.lower_bound({name, {}});
    return found == searches_.end() || found->first.name != name ? nullptr : &found->second;
  }
  void keep_for(Time now, const std::string& name, session::OutgoingMessage message,
                const Uid& instance, const std::string& scope);
  bool may_ask(const Peer& peer, const Search& search) const;
  Peer* peer_of(const DialTarget& target) const {
    return target.of.empty() ? find_peer(target.peer) : find_peer(target.of);
  }
  void ask_all_peers(Time now, Search& search);
  void ask(Time now, Peer& peer, const std::string& name);
  void search_due(Time now, std::uint64_t number);
  void end_search(Time now, Peer& peer);
  void send_services(Time now, Peer& peer, Search& search);
  void drop_overdue(Time now, Search& search);
  void undelivered(const Uid& instance);
  void directory_message(Time now, Peer& from, const wire::Payload& payload);
  void tell_of(Time now, Peer& to, Found found);
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

  // explain.cc
  void explain_peer(Time now, const Peer& peer, Explanation& explanation) const;
  void explain_absence(Time now, const PeerName& of, Explanation& explanation) const;
  PathState explain_path(wire::PathKind kind, const Peer& peer,
                         const std::vector<session::LinkInfo>& links) const;
  std::string why_not_live(const PathState& path, const Peer& peer) const;

  // node.cc
  void finish_close(Time now);

  Config config_;
  Allocator* allocator_;
  const Authenticator* authenticator_;
  std::vector<std::string> addresses_;
  std::map<std::string, std::string, std::less<>> functions_;  // and the group that may call each
  std::vector<Action> actions_;
  TimerQueue timers_;
  bool greeted_anyone_ = false;  // the name was announced

  std::map<ConnectionId, Connection> connections_;
  std::map<Uid, std::unique_ptr<Peer>> peers_;
  // Of peers that have proven themselves: name and scope.
  std::map<std::pair<std::string, std::string>, Uid> names_;
  std::uint64_t peers_made_ = 0;
  std::deque<Peer*> touched_;
  std::vector<session::Action> session_actions_;

  CallId last_call_ = 0;
  std::map<CallId, Call> calls_;
  std::map<CallKey, Running> running_;

  Dialler dialler_;
  std::uint64_t greetings_ = 0;
  std::string last_warning_;
  Time warned_at_{};
  std::uint64_t last_search_ = 0;
  std::map<PeerName, Search> searches_;
  // Names whose meaning was not certain, and the peers that they mean: this one, or one that is up.
  std::map<PeerName, Uid> meanings_;
  std::map<std::string, Past, std::less<>> past_;  // a few
  LogLimit log_limit_;

  bool any_broken_ = false;
  bool closing_ = false;
  bool closed_ = false;
  Time close_at_ = kNever;
};

}  // namespace moolink::rpc
