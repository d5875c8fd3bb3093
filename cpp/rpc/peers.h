#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/barrier.h"
#include "base/buffer.h"
#include "base/names.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/shared.h"
#include "session/session.h"
#include "wire/payload.h"

namespace moolink::rpc {

// Lanes from here on belong to services, one each; users' lanes are folded below.
inline constexpr std::uint16_t kServiceLanes = 0xff00;

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

// The record of one peer instance. A component writes its own part of it only.
struct Peer {
  Peer(session::Config config, Allocator& allocator)
      : instance(config.peer), session(std::move(config), allocator) {}

  Uid instance;
  std::string name;   // known once it is proven
  std::string scope;  // the group that it is confined to; empty: none
  Uid host_key;
  std::vector<std::string> addresses;
  session::Session session;
  bool up = false;                       // PeerUp was emitted, PeerDown not yet
  bool touched = false;                  // its session has actions to carry out
  Down down_reason = Down::unreachable;  // for PeerDown
  Time timer = kNever;
  // Its session has ended in `lost`, or must end: there was no memory for that, so the next event
  // retries.
  std::optional<session::Lost> lost;
  bool broken = false;
  // Peers: messages that the session's window has refused. Replies and services go first, then
  // calls.
  std::deque<session::OutgoingMessage> queued;
  std::size_t queued_bytes = 0;
  LaneCounts queued_lanes;  // a message overtakes those of other lanes

  // Calls: those of this side that the window has refused.
  std::deque<WaitingCall> backlog;
  LaneCounts backlog_lanes;

  // Handlers: its calls to this side, taken and not replied to.
  std::size_t running = 0;
  std::size_t running_bytes = 0;
  bool held = false;                 // told to send no more calls
  bool handlers_held = false;        // HoldHandlers was emitted
  std::size_t calls_since_held = 0;  // received although held
  std::size_t bytes_since_held = 0;
  std::deque<CallId> early_cancels;  // that overtook their calls

  // Dialler.
  bool silent = false;         // its addresses are dialled beside a connection
  bool fallback_told = false;  // logged: a better path was given up, or lost
  Tried tried;

  // Directory.
  bool tells_namesakes = false;            // it answers NamesakesMessage
  std::set<std::string> names_asked = {};  // by it, in such messages

  // Nothing is in transit to it, as far as there is a path.
  bool flushed() const { return !up || (session.flushed() && queued.empty()); }
  // Whether it may take part in a group's traffic: one confined to another group may not.
  bool may_concern(const std::string& group) const {
    return scope.empty() || group.empty() || scope == group;
  }
};

// The known peers, by instance and by proven name, each with its session and the messages that wait
// for the session's window. It knows which sessions an event has touched: the Node carries out
// their actions, see next_touched(). A peer is made when it proves who it is, and is forgotten once
// it has no session and nothing refers to it; until then a Peer* stays valid. The Node owns this;
// every other component may use it, and only the Node forgets peers.
class Peers {
 public:
  // `allocator`: for the sessions; outlives this.
  Peers(Shared& shared, Allocator& allocator) : shared_(shared), allocator_(allocator) {}

  // Null: not known.
  Peer* find(const Uid& instance) const {
    const auto found = peers_.find(instance);
    return found == peers_.end() ? nullptr : found->second.get();
  }
  // Scopes distinguish equal names; without one, a peer of the whole job before others. For calls,
  // see Directory::receiver_of().
  Peer* find(const std::string& name) const;
  Peer* find(const std::string& name, const std::string& scope) const;
  const std::map<Uid, std::unique_ptr<Peer>>& all() const { return peers_; }
  bool any_is_up() const {
    return std::ranges::any_of(peers_, [](const auto& entry) { return entry.second->up; });
  }
  // The scopes of the peers of that name that are up.
  std::set<std::string> groups_of(const std::string& name) const;
  // Connected and heard: a silent peer may have been cut off without notice.
  static bool answers(Time now, const Peer* peer);
  std::vector<PeerInfo> infos(Time now) const;

  Peer& ensure(const Uid& instance);
  // It has proven that the name is its own.
  void set_name(Peer& peer, const std::string& name, const std::string& scope);
  void forget(const Peer& peer);

  // ---- sessions ----

  // The exception barrier: an exception of `work` ends the peer's session, here and at the peer.
  template <class Work>
  bool guarded(Peer& peer, Work&& work) {
    if (guard(work, [&](const Error& error) { fail_session(peer, error); })) return true;
    if (!peer.session.ended()) peer.broken = any_broken_ = true;
    return false;
  }
  // Its session may have actions.
  void touch(Peer& peer) {
    if (peer.touched) return;
    touched_.push_back(&peer);
    peer.touched = true;
  }
  // The next peer whose session has actions to be carried out; null: none. The caller clears
  // Peer::touched when it has done so.
  Peer* next_touched();
  // An action of this side failed: both ends of the session get the reason.
  void fail_session(Peer& peer, const Error& error);
  // The peer is gone, or must go: the session ends at this side.
  void end(Peer& peer, Down reason, const std::string& why);
  // The session has ended in `lost`: to be worked off, again with the next event if that fails.
  void set_lost(Peer& peer, session::Lost lost) {
    peer.lost = std::move(lost);
    any_broken_ = true;
  }
  // Ends sessions that could not end for lack of memory; work_off(peer) does what depends on a
  // session that is lost.
  template <class WorkOff>
  void retry_broken_sessions(WorkOff work_off) {
    if (!std::exchange(any_broken_, false)) return;
    for (const auto& [instance, entry] : peers_) {
      Peer& peer = *entry;
      guarded(peer, [&] {
        if (std::exchange(peer.broken, false)) {
          fail_session(peer, make_error(ErrorCode::error, "out of memory"));
        }
        if (peer.lost) work_off(peer);
      });
      any_broken_ = any_broken_ || peer.lost;
    }
  }
  // Sets the timer of its session.
  void arm(Peer& peer);
  bool counts(const Timer& timer) const {
    const Peer* peer = find(timer.instance);
    return peer != nullptr && peer->timer == timer.at;
  }

  // ---- messages ----

  // Sends the message, or queues it behind those that the session's window has refused: these count
  // against the peer's calls (Handlers), and a peer that takes none is disconnected. A message to a
  // session that is being lost is dropped. Throws Exception{invalid_argument} if it is over the
  // limits.
  void send(Time now, Peer& peer, session::OutgoingMessage message);
  void send_service(Time now, Peer& peer, Service service, wire::Payload payload);
  // Sends queued messages, in order; false: the window is full again.
  bool flush(Time now, Peer& peer);

 private:
  void queue(Peer& peer, session::OutgoingMessage message);

  Shared& shared_;
  Allocator& allocator_;
  std::map<Uid, std::unique_ptr<Peer>> peers_;
  // Of peers that have proven themselves: name and scope.
  std::map<std::pair<std::string, std::string>, Uid> names_;
  std::uint64_t made_ = 0;
  std::deque<Peer*> touched_;
  bool any_broken_ = false;
};

session::OutgoingMessage service_message(Service service, wire::Payload payload);

}  // namespace moolink::rpc
