#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/names.h"
#include "base/time.h"
#include "base/uid.h"
#include "rpc/actions.h"
#include "rpc/handlers.h"
#include "rpc/peers.h"
#include "rpc/shared.h"
#include "session/session.h"
#include "wire/payload.h"

namespace moolink::rpc {

// A call of this side without a result yet.
struct Call {
  enum class State : std::uint8_t { searching, waiting, sent, local };
  // The items of a stream.
  struct Items {
    std::uint64_t allowed = 0;
    std::uint64_t told = 0;   // of `allowed`, to the handler
    std::uint64_t taken = 0;  // delivered, in order
    Duration timeout{};       // below zero: none
    std::map<std::uint64_t, wire::Payload> early;
    // The end arrived before the last items.
    std::optional<Reply> end;
    std::uint64_t end_after = 0;
  };

  CallId id = 0;
  State state = State::searching;
  PeerName receiver;
  std::string function;
  wire::Payload arguments;  // until it is sent
  std::uint16_t lane = 0;
  Time deadline = kNever;
  Time started{};
  Uid instance;  // the instance that it waits for, was sent to, or runs at
  std::optional<Items> stream;
};

// The calls of this side, from add() to Complete, which each gets exactly once. A call searches its
// peer (Directory), waits for the window of the peer's session (Peer::backlog), and is then sent;
// or it runs here. Items and replies of a stream travel unordered and are put in order here, so
// that a stream delays nothing and is delayed by nothing else. The Node owns this and passes it
// results and the ends of sessions; Directory hands it the peer that a call has searched. A Call&
// is valid until its call is complete.
class Calls {
 public:
  Calls(Shared& shared, Peers& peers, Handlers& handlers)
      : shared_(shared), peers_(peers), handlers_(handlers) {}

  // Parameters as of Node::call(). The call is still to be armed, and sent or run.
  Call& add(Time now, const std::string& peer, const std::string& function, wire::Payload arguments,
            Duration timeout, std::uint16_t lane, std::uint64_t credit);
  // Null: it is complete.
  Call* find(CallId id) {
    const auto found = calls_.find(id);
    return found == calls_.end() ? nullptr : &found->second;
  }
  bool contains(CallId id) const { return calls_.contains(id); }
  // Sets the timer of its deadline.
  void arm(const Call& call) {
    shared_.timers.push({call.deadline, Timer::Kind::call, call.id, {}});
  }
  void run_here(Call& call);
  // Sends the call, or queues it behind those that the session's window has refused. A large call
  // does not delay small ones of other lanes, but it delays other large ones, which could take all
  // the room.
  void dispatch(Time now, Peer& peer, Call& call);
  // Sends calls of the backlog, in order, as far as the window allows.
  void flush(Time now, Peer& peer);

  void raise_credit(Time now, Call& call, std::uint64_t more);

  // Messages of a peer. Throw Exception{wire} if it breaks the protocol.
  void delivered_result(Peer& peer, session::Deliver& delivered);
  void delivered_item(Time now, Peer& peer, session::Deliver& delivered);
  // The next item of a stream that runs here.
  void take_item(Time now, CallId id, std::uint64_t number, wire::Payload item) {
    take_item(now, calls_.at(id), number, std::move(item));
  }

  // ---- ends; without effect on a call that is complete ----

  void complete(CallId id, Reply result);
  void fail(CallId id, ErrorCode code, std::string message);  // it has not run
  // An exception, at whatever point of the call.
  void fail_begun(CallId id, const Error& error);
  void cancel(Time now, const Call& call);
  // `why_unreached`: why its peer is still searched.
  void time_out(Time now, CallId id, const std::function<std::string(const PeerName&)>& why);
  // This peer closes: no outstanding result will come.
  void fail_all();
  // The peer's session has ended.
  void fail_all_of(Peer& peer, const session::Lost& lost);

  bool counts(const Timer& timer) const {
    const auto found = calls_.find(timer.id);
    return found != calls_.end() && found->second.deadline == timer.at;
  }
  // In order of their start; `why`: as of time_out().
  std::vector<PendingCall> pending(Time now,
                                   const std::function<std::string(const PeerName&)>& why) const;

 private:
  bool transmit(Time now, Peer& peer, Call& call);
  void stop_handler(Time now, const Call& call);
  void await_items(Time now, Call& call);
  void tell_credit(Time now, Call& call);
  void take_item(Time now, Call& call, std::uint64_t number, wire::Payload item);
  void end_stream(Call& call, Reply end, std::uint64_t count);

  Shared& shared_;
  Peers& peers_;
  Handlers& handlers_;
  CallId last_ = 0;
  std::map<CallId, Call> calls_;
};

}  // namespace moolink::rpc
