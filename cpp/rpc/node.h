#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/names.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/authenticator.h"
#include "rpc/calls.h"
#include "rpc/connection_table.h"
#include "rpc/connections.h"
#include "rpc/dialler.h"
#include "rpc/directory.h"
#include "rpc/handlers.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "session/session.h"
#include "wire/frame.h"
#include "wire/path.h"
#include "wire/payload.h"

namespace moolink::rpc {

// The state of one Rpc: its name, peers, connections, sessions and calls, and the directory. A
// machine: events in, actions out; no clock, no I/O, no user code, no lock. Its owner (RpcPeer, a
// simulator) passes it the user's requests and the transports' events, one at a time, with a `now`
// that never goes back; it then drains the actions and carries them out in order, and calls tick()
// at next_deadline(). docs/design/protocol/rpc.md holds the tables.
//
// The state is that of the components, each above those that it uses: Shared, Peers, Handlers,
// Calls, ConnectionTable, Dialler, Directory, Connections. This class only passes each event to its
// component, and the actions of sessions too: every event ends in settle(), which turns the actions
// of the sessions it touched into the Node's. An exception of an event ends the call, connection or
// session that it was for. close() ends in Closed.
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
    shared_.addresses.insert(shared_.addresses.end(), addresses.begin(), addresses.end());
  }
  const std::vector<std::string>& addresses() const { return shared_.addresses; }
  // The paths that exist here, and for explain() the reasons why others do not.
  void set_paths(std::vector<wire::PathKind> paths, wire::Lacking lacking = {}) {
    shared_.config.paths = std::move(paths);
    shared_.config.lacking = std::move(lacking);
  }
  // Only before the first connection: the name is announced in the greeting. Throws
  // Exception{invalid_argument} later.
  void set_name(const std::string& name);
  // `group`: peers confined to another one cannot call it, nor see that it exists.
  void define(const std::string& function, const std::string& group = {}) {
    handlers_.define(function, group);
  }
  void undefine(const std::string& function) { handlers_.undefine(function); }
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
  void turned_away(Time now, const Error& error) { connections_.turned_away(now, error); }
  // A peer tries to connect, and this process has no descriptor or memory for it.
  void cannot_accept(Time now, const Error& error) { connections_.warn_once(now, error.message); }
  void received(Time now, ConnectionId connection, const wire::ReceivedFrame& frame);
  std::span<std::byte> chunk_target(ConnectionId connection, const wire::ChunkHead& head);
  // An event of the connection for its session, if it carries messages:
  // event(&session::Session::grant_filled, now, connection, grant).
  template <class... More>
  void event(void (session::Session::*what)(Time, ConnectionId, More...), Time now, ConnectionId id,
             std::type_identity_t<More>... more) {
    Connection* found = table_.find_attached(id);
    if (found == nullptr) return;
    Peer& peer = *found->peer;
    peers_.guarded(peer, [&] {
      peers_.touch(peer);
      (peer.session.*what)(now, id, std::forward<More>(more)...);
    });
    settle(now);
  }
  void return_loans(Time now, const Uid& lender, std::uint64_t session,
                    std::span<const std::uint64_t> loans);
  // For its connection in use and its pre-posted buffers; null: the peer is not known.
  session::Session* session_with(const Receiver& receiver) const;
  void closed(Time now, ConnectionId connection, const Error& error);
  // Every message sent to the instance has arrived, or it is not connected.
  bool flushed(const Uid& instance) const {
    const Peer* found = peers_.find(instance);
    return found == nullptr || found->flushed();
  }
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
  Time next_deadline() const { return shared_.timers.next(); }

  // The actions since the last call; the vector's memory is used again.
  void drain(std::vector<Action>& into) {
    into.clear();
    into.swap(shared_.actions);
  }

  const std::string& name() const { return shared_.config.name; }
  const Uid& instance() const { return shared_.config.instance; }
  std::vector<PeerInfo> peers(Time now) const { return peers_.infos(now); }
  // How a peer is reached, or why it is not.
  Explanation explain(Time now, const std::string& peer) const;
  std::vector<PendingCall> pending_calls(Time now) const;  // in order of their start
  std::vector<std::string> searched_names() const { return directory_.searched_names(); }

 private:
  void begin_call(Time now, Call& call);
  void due(Time now, const Timer& timer);
  bool counts(const Timer& timer) const;
  void settle(Time now);
  void settle_peer(Time now, Peer& peer);
  void perform(Time now, Peer& peer, session::Action& action);
  void attached(Time now, Peer& peer, ConnectionId connection);
  void deliver(Time now, Peer& peer, session::Deliver& delivered);
  void deliver_service(Time now, Peer& peer, session::Deliver& delivered);
  void lost(Time now, Peer& peer);
  void forget_if_gone(const Peer& peer);
  void finish_close(Time now);

  Shared shared_;
  Peers peers_;
  Handlers handlers_;
  Calls calls_;
  ConnectionTable table_;
  Dialler dialler_;
  Directory directory_;
  Connections connections_;
  std::vector<session::Action> session_actions_;  // memory of settle_peer()
  bool closed_ = false;
  Time close_at_ = kNever;
};

}  // namespace moolink::rpc
