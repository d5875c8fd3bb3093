// Calls of this side, and handlers that run here for others.

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "base/mutant.h"
#include "rpc/node.h"

namespace moolink::rpc {

namespace {

constexpr std::size_t kEarlyCancels = 1024;  // remembered for one peer

Error call_error(ErrorCode code, std::string message, const Call& call, Ran ran) {
  return {.code = code,
          .message = std::move(message),
          .peer = call.receiver.text(),
          .function = call.function,
          .ran = ran};
}

// Whether the handler of a call without a result may have run.
Ran may_have_run(const Call& call) {
  return call.state == Call::State::sent || call.state == Call::State::local ? Ran::maybe : Ran::no;
}

}  // namespace

CallId Node::call(Time now, const std::string& peer, const std::string& function,
                  wire::Payload arguments, Duration timeout, std::uint16_t lane,
                  std::uint64_t credit) {
  if (credit > kMostCredit) {
    throw Exception(ErrorCode::invalid_argument,
                    "a stream of more than " + std::to_string(kMostCredit) + " items at once");
  }
  const CallId id = ++last_call_;
  Call& call = calls_[id];
  call.receiver = PeerName::of(peer);
  call.function = function;
  call.arguments = std::move(arguments);
  call.lane = lane == 0 ? 0 : static_cast<std::uint16_t>(1 + (lane - 1) % (kServiceLanes - 1));
  call.started = now;
  if (timeout >= Duration(0) && timeout < kNever - now) call.deadline = now + timeout;
  if (credit > 0) call.stream = ItemsIn{credit, 0, 0, timeout, {}, {}, 0};
  guard([&] { begin_call(now, id, call); },
        [&](const Error& error) {
          if (!calls_.contains(id)) return;
          if (call.state == Call::State::local) stop_running({config_.instance, id}, true);
          complete(id, call_error(error.code, error.message, call, may_have_run(call)));
        });
  settle(now);
  return id;
}

void Node::begin_call(Time now, CallId id, Call& call) {
  if (closing_) {
    complete(
        id, call_error(ErrorCode::closed, "peer '" + config_.name + "' was closed", call, Ran::no));
    return;
  }
  timers_.push({call.deadline, Timer::Kind::call, id, {}});
  const PeerName& of = call.receiver;
  if (means_this(of)) {
    run_locally(id, call);
  } else if (Peer* peer = receiver_of(of)) {
    dispatch(now, *peer, id, call);
  } else {
    const bool is_new = !searches_.contains(of);
    Search& search = search_for(now, of);
    if (is_new) ask_all_peers(now, search);
    if (search.calls.size() >= config_.max_waiting_calls) {
      complete(id, call_error(ErrorCode::queue_full,
                              "too many calls wait for peer '" + call.receiver.text() + "', " +
                                  why_unreached(of),
                              call, Ran::no));
      return;
    }
    search.calls.push_back(id);
    if (search.calls.size() == 1) resume_calls(now, search);
  }
}

void Node::run_locally(CallId id, Call& call) {
  call.state = Call::State::local;
  call.instance = config_.instance;
  if (!functions_.contains(call.function)) {
    complete(id, call_error(ErrorCode::no_such_function,
                            "peer '" + config_.name + "' has no function '" + call.function + "'",
                            call, Ran::no));
    return;
  }
  const CallKey key{config_.instance, id};
  Running& running = running_[key];
  running.bytes = call.arguments.bytes();
  if (call.stream) {
    call.stream->told = call.stream->allowed;
    running.stream = ItemsOut{call.stream->allowed, 0};
  } else {
    running.deadline = call.deadline;
    timers_.push({call.deadline, Timer::Kind::handler, id, config_.instance});
  }
  actions_.push_back(RunHandler{key,
                                config_.name,
                                call.function,
                                std::move(call.arguments),
                                running.deadline,
                                call.stream ? call.stream->allowed : 0,
                                {}});
}

// Sends the call, or queues it behind those that the session's window has refused. A large call
// does not delay small ones of other lanes, but it delays other large ones, which could take all
// the room.
void Node::dispatch(Time now, Peer& peer, CallId id, Call& call) {
  call.state = Call::State::waiting;
  call.instance = peer.instance;
  const bool small = call.arguments.bytes() <= session::kInlineBytes;
  const bool must_wait = (!small && !peer.backlog.empty()) ||
                         (peer.backlog_lanes.must_wait(call.lane) && !mutant("overtake_in_lane"));
  if (!must_wait && transmit_call(now, peer, id, call)) return;
  if (!calls_.contains(id)) return;  // it was over the limits
  if (peer.backlog.size() >= config_.max_waiting_calls) {
    complete(id, call_error(ErrorCode::queue_full,
                            "too many calls wait for peer '" + call.receiver.text() +
                                "': it does not keep up; wait for replies before calling again",
                            call, Ran::no));
    return;
  }
  peer.backlog.push_back({id, call.lane});
  peer.backlog_lanes.add(call.lane);
}

// False: the window is full, or the call has ended in an error.
bool Node::transmit_call(Time now, Peer& peer, CallId id, Call& call) {
  const std::size_t bytes = call.arguments.bytes() + call.function.size() + 16;
  const std::size_t parts = call.arguments.parts.size() + 1;  // the user's body is one then
  if (!peer.session.accepts(bytes, parts, true)) {
    peer.session.tell_when_open();
    return false;
  }
  session::OutgoingMessage message;
  message.lane = call.lane;
  message.kind = static_cast<std::uint8_t>(MessageKind::call);
  message.held = true;
  // Only the caller counts the time of a stream, from item to item.
  if (!call.stream) message.deadline = call.deadline;
  message.cookie = id;
  const std::uint64_t credit = call.stream ? call.stream->allowed : 0;
  const auto make = [&] {
    message.payload = with_head(CallHead{id, call.function, credit}, std::move(call.arguments));
    session::check(message, config_.limits);
  };
  const bool made = guard(make, [&](const Error& refused) {
    complete(id, call_error(refused.code, refused.message, call, Ran::no));
  });
  if (!made) return false;
  // From here on it ends with the session, if that breaks.
  call.state = Call::State::sent;
  if (call.stream) call.stream->told = credit;
  guarded(peer, [&] {
    touch(peer);
    peer.session.send(now, std::move(message));
  });
  return true;
}

void Node::complete(CallId id, Reply result) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  const Call& call = found->second;
  if (auto* error = std::get_if<Error>(&result)) {
    if (error->peer.empty()) error->peer = call.receiver.text();
    if (error->function.empty()) error->function = call.function;
  }
  if (mutant("complete_twice") && std::holds_alternative<Error>(result)) {
    actions_.push_back(Complete{id, result});
  }
  actions_.push_back(Complete{id, std::move(result)});
  const bool has_timer = call.deadline != kNever;
  calls_.erase(found);
  if (has_timer) forget_timer();
}

void Node::time_out(Time now, CallId id) {
  const Call& call = calls_.at(id);
  const bool between_items = call.stream && call.stream->taken > 0;
  std::string text = "'" + call.function + "' at peer '" + call.receiver.text() +
                     "' timed out after " +
                     in_seconds(between_items ? call.stream->timeout : now - call.started) +
                     (between_items ? " without another item" : "");
  switch (call.state) {
    case Call::State::searching:
      text += ": " + why_unreached(call.receiver);
      break;
    case Call::State::waiting:
      text += ": the peer does not take more calls now";
      break;
    case Call::State::sent: {
      const Peer* peer = find_peer(call.instance);
      const bool silent = peer == nullptr || !peer->session.connected();
      text += silent ? ": the connection to the peer is lost" : ": the peer has not replied";
      break;
    }
    case Call::State::local:
      text += ": its handler, at this very peer, has not replied";
      break;
  }
  if (call.stream) stop_handler(now, id, call);
  complete(id, call_error(ErrorCode::timeout, std::move(text), call, may_have_run(call)));
}

std::string Node::why_unreached(const PeerName& of) const {
  const auto search = searches_.find(of);
  const std::string name = of.text();
  std::string text;
  if (search != searches_.end() && search->second.namesakes) {
    const bool alone = of.group.empty();
    text = "peer '" + of.name + "' holds " + (alone ? "a group's key" : "the token") +
           ", and other peers have not said yet whether " +
           (alone ? "another group" : "group '" + of.group + "'") + " has a peer of that name";
  } else if (search != searches_.end() && search->second.reachable) {
    text = "peer '" + name + "' is known but does not answer";
  } else if (search != searches_.end() && search->second.found) {
    text = "peer '" + name + "' is known, but none of its addresses can be reached from here";
  } else {
    text = "peer '" + name + "' is not known to any connected peer";
    if (!any_peer_is_up()) text += ": none is connected";
  }
  for (const auto& [address, target] : dialler_.targets()) {
    if (!target.last_error.empty()) text += "; " + with_address(address, target.last_error);
  }
  return text;
}

void Node::cancel(Time now, CallId id) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  const Call& call = found->second;
  stop_handler(now, id, call);
  complete(
      id, call_error(ErrorCode::cancelled,
                     "'" + call.function + "' at peer '" + call.receiver.text() + "' was cancelled",
                     call, may_have_run(call)));
  settle(now);
}

// The caller does not wait any more.
void Node::stop_handler(Time now, CallId id, const Call& call) {
  if (call.state == Call::State::local) {
    stop_running({config_.instance, id}, true);
  } else if (call.state == Call::State::sent && !mutant("cancel_is_local")) {
    Peer* peer = find_peer(call.instance);
    if (peer == nullptr) return;
    send_or_queue(now, *peer, message_of(MessageKind::cancel, head_only(CancelHead{id})));
  }
}

// This peer closes: no outstanding result will come.
void Node::fail_all_calls() {
  while (!calls_.empty()) {
    const auto& [id, call] = *calls_.begin();
    if (call.state == Call::State::local) stop_running({config_.instance, id}, true);
    complete(id, call_error(ErrorCode::closed, "this peer was closed while the call was under way",
                            call, may_have_run(call)));
  }
}

void Node::fail_calls_of(const Peer& peer, const session::Lost& lost) {
  std::map<CallId, Ran> ran;
  for (const session::LostMessage& message : lost.messages) {
    if (message.cookie != 0) ran[message.cookie] = message.written;
  }
  if (mutant("forget_calls_of_lost_peer")) return;
  for (auto next = calls_.begin(); next != calls_.end();) {
    auto& [id, call] = *next++;
    if (call.instance != peer.instance) continue;
    if (mutant("send_again_after_loss")) {
      call.state = Call::State::searching;
      call.instance = {};
      searches_[call.receiver].calls.push_back(id);
      continue;
    }
    Ran whether = Ran::no;
    if (call.state == Call::State::sent) {
      const auto entry = ran.find(id);
      whether = entry == ran.end() ? Ran::maybe : entry->second;
    }
    const bool refused = lost.reason.code == ErrorCode::auth;
    complete(id, call_error(refused ? ErrorCode::auth : ErrorCode::peer_lost,
                            "peer '" + call.receiver.text() + "' was lost during '" +
                                call.function + "': " + lost.reason.message,
                            call, whether));
  }
}

// ---- handlers ----

void Node::delivered_call(Time now, Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<CallHead>(delivered.payload.body);
  const auto early = std::ranges::find(peer.early_cancels, head.id);
  if (early != peer.early_cancels.end()) {
    peer.early_cancels.erase(early);
    return;
  }
  if (delivered.deadline <= now && !mutant("run_expired_call")) return;  // no waiting caller
  const auto fail = [&](ErrorCode code, std::string text) {
    send_result(now, peer, head.id,
                Error{.code = code,
                      .message = std::move(text),
                      .peer = config_.name,
                      .function = head.function});
  };
  if (delivered.error) return fail(delivered.error.code, delivered.error.message);
  // Closed is an error of the caller's own objects.
  if (closing_) return fail(ErrorCode::peer_lost, "peer '" + config_.name + "' closes");
  const auto function = functions_.find(head.function);
  if (function == functions_.end() || !may_concern(peer, function->second)) {
    return fail(ErrorCode::no_such_function,
                "peer '" + config_.name + "' has no function '" + head.function + "'");
  }
  if (head.credit > kMostCredit) wire::fail("a stream of too many items at once");
  const CallKey key{peer.instance, head.id};
  wire::Payload arguments = user_payload(std::move(delivered.payload));
  const std::size_t bytes = arguments.cost();
  if (ignores_window(peer, bytes)) wire::fail("calls beyond the window");
  Running running{delivered.deadline, bytes, {}};
  const std::string group = arguments.from_guest ? peer.scope : std::string();
  if (head.credit > 0) running.stream = ItemsOut{head.credit, 0};
  actions_.push_back(RunHandler{key, peer.name, head.function, std::move(arguments),
                                delivered.deadline, head.credit, group});
  if (!running_.try_emplace(key, running).second) {
    actions_.pop_back();
    wire::fail("a call's id was used twice");
  }
  ++peer.running;
  peer.running_bytes += bytes;
  timers_.push({delivered.deadline, Timer::Kind::handler, head.id, peer.instance});
}

void Node::delivered_result(Peer& peer, session::Deliver& delivered) {
  auto head = wire::decode<ResultHead>(delivered.payload.body);
  const auto found = calls_.find(head.id);
  if (found == calls_.end()) return;  // timed out or cancelled
  Call& call = found->second;
  const bool asked = call.state == Call::State::sent && call.instance == peer.instance;
  if (!asked) return;
  Reply reply;
  if (head.error) {
    head.error->peer = call.receiver.text();  // as the caller names it, whatever the peer says
    reply = std::move(*head.error);
  } else if (delivered.error) {
    reply = call_error(delivered.error.code, delivered.error.message, call, Ran::yes);
  } else {
    reply = user_payload(std::move(delivered.payload));
  }
  if (call.stream) {
    end_stream(head.id, call, std::move(reply), head.items);
  } else {
    complete(head.id, std::move(reply));
  }
}

void Node::delivered_cancel(Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<CancelHead>(delivered.payload.body);
  const CallKey key{peer.instance, head.id};
  if (running_.contains(key)) {
    stop_running(key, true);
    return;
  }
  if (mutant("forget_early_cancel")) return;
  peer.early_cancels.push_back(head.id);  // or the reply is in transit: then it is never looked up
  if (peer.early_cancels.size() > kEarlyCancels) peer.early_cancels.pop_front();
}

void Node::reply(Time now, const CallKey& key, Reply reply) {
  const auto found = running_.find(key);
  if (found == running_.end()) return;  // the caller does not wait any more
  const std::uint64_t items = found->second.stream ? found->second.stream->sent : 0;
  stop_running(key, false);
  if (key.caller == config_.instance) {
    complete(key.id, std::move(reply));
  } else if (Peer* peer = find_peer(key.caller)) {
    send_result(now, *peer, key.id, std::move(reply), items);
  }
  settle(now);
}

void Node::send_result(Time now, Peer& peer, CallId id, Reply reply, std::uint64_t items) {
  session::OutgoingMessage message;
  message.kind = static_cast<std::uint8_t>(MessageKind::result);
  const bool made = guarded(peer, [&] {
    if (auto* error = std::get_if<Error>(&reply)) {
      message.payload = head_only(ResultHead{id, std::move(*error), items});
    } else {
      message.payload =
          with_head(ResultHead{id, {}, items}, std::move(std::get<wire::Payload>(reply)));
    }
  });
  if (!made) return;
  try {
    send_or_queue(now, peer, std::move(message));
  } catch (const Exception& refused) {
    send_result(
        now, peer, id,
        make_error(ErrorCode::error, "the result cannot be sent: " + refused.error().message),
        items);
  }
}

void Node::stop_running(const CallKey& key, bool tell_handler) {
  const auto found = running_.find(key);
  if (found == running_.end()) return;
  if (tell_handler) actions_.push_back(CancelHandler{key});
  const Running running = found->second;
  if (Peer* peer = find_peer(key.caller)) {
    guarded(*peer, [&] { touch(*peer); });
    --peer->running;
    peer->running_bytes -= running.bytes;
  }
  running_.erase(found);
  if (running.deadline != kNever) forget_timer();
}

void Node::stop_all_of(const Uid& caller) {
  for (auto next = running_.lower_bound({caller, 0});
       next != running_.end() && next->first.caller == caller;) {
    const CallKey key = next++->first;
    stop_running(key, true);
  }
}

// Calls in transit when the peer was told to hold its calls fit its send window: a peer that sends
// several times that ignores it, and would make this side hold any number of calls.
bool Node::ignores_window(Peer& peer, std::size_t bytes) const {
  constexpr std::size_t kTimes = 4;  // paths may change meanwhile
  if (!peer.held) return false;
  const Limits& limits = config_.limits;
  // A call larger than the window is one of those that may be in transit.
  peer.bytes_since_held += std::min(bytes, limits.send_window_bytes);
  return ++peer.calls_since_held > kTimes * limits.send_window_messages ||
         peer.bytes_since_held > kTimes * limits.send_window_bytes;
}

// Calls that arrived before this side could stop the peer are here already: WINDOW is too late for
// them, and each may make a large result.
void Node::balance_handlers(Peer& peer) {
  const bool over = peer.queued_bytes > config_.max_queued_bytes;
  const bool under = peer.queued_bytes <= config_.max_queued_bytes / 2;
  if (over == peer.handlers_held || (peer.handlers_held && !under)) return;
  if (mutant("handlers_stay_held") && peer.handlers_held) return;
  actions_.push_back(HoldHandlers{peer.instance, over});
  peer.handlers_held = over;
}

// Tells a peer with too many calls here to hold them, and to continue when half are done.
void Node::balance_window(Time now, Peer& peer) {
  // Messages that its calls caused and that could not be sent yet count with them.
  const std::size_t calls = peer.running + peer.queued.size();
  const std::size_t bytes = peer.running_bytes + peer.queued_bytes;
  const bool over = calls > config_.max_running_calls || bytes > config_.max_running_bytes;
  const bool under =
      calls <= config_.max_running_calls / 2 && bytes <= config_.max_running_bytes / 2;
  if (over == peer.held || (peer.held && !under)) return;
  if (mutant("window_stays_shut") && peer.held) return;
  peer.held = over;
  peer.calls_since_held = peer.bytes_since_held = 0;
  peer.session.set_receive_window(now, config_.limits.send_window_bytes,
                                  over ? 0 : config_.limits.send_window_messages);
}

}  // namespace moolink::rpc
