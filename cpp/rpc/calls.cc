#include "rpc/calls.h"

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "rpc/messages.h"

namespace moolink::rpc {

namespace {

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

Call& Calls::add(Time now, const std::string& peer, const std::string& function,
                 wire::Payload arguments, Duration timeout, std::uint16_t lane,
                 std::uint64_t credit) {
  if (credit > kMostCredit) {
    throw Exception(ErrorCode::invalid_argument,
                    "a stream of more than " + std::to_string(kMostCredit) + " items at once");
  }
  Call& call = calls_[++last_];
  call.id = last_;
  call.receiver = PeerName::of(peer);
  call.function = function;
  call.arguments = std::move(arguments);
  call.lane = lane == 0 ? 0 : static_cast<std::uint16_t>(1 + (lane - 1) % (kServiceLanes - 1));
  call.started = now;
  if (timeout >= Duration(0) && timeout < kNever - now) call.deadline = now + timeout;
  if (credit > 0) call.stream = Call::Items{credit, 0, 0, timeout, {}, {}, 0};
  return call;
}

void Calls::run_here(Call& call) {
  call.state = Call::State::local;
  call.instance = shared_.config.instance;
  if (!handlers_.defines(call.function)) {
    const std::string& name = shared_.config.name;
    complete(call.id, call_error(ErrorCode::no_such_function,
                                 "peer '" + name + "' has no function '" + call.function + "'",
                                 call, Ran::no));
    return;
  }
  if (call.stream) call.stream->told = call.stream->allowed;
  handlers_.run_here(call.id, call.function, std::move(call.arguments), call.deadline,
                     call.stream ? call.stream->allowed : 0);
}

void Calls::dispatch(Time now, Peer& peer, Call& call) {
  const CallId id = call.id;
  call.state = Call::State::waiting;
  call.instance = peer.instance;
  const bool small = call.arguments.bytes() <= session::kInlineBytes;
  const bool must_wait =
      (!small && !peer.backlog.empty()) || peer.backlog_lanes.must_wait(call.lane);
  if (!must_wait && transmit(now, peer, call)) return;
  if (!contains(id)) return;  // it was over the limits
  if (peer.backlog.size() >= shared_.config.max_waiting_calls) {
    fail(id, ErrorCode::queue_full,
         "too many calls wait for peer '" + call.receiver.text() +
             "': it does not keep up; wait for replies before calling again");
    return;
  }
  peer.backlog.push_back({id, call.lane});
  peer.backlog_lanes.add(call.lane);
}

// False: the window is full, or the call has ended in an error.
bool Calls::transmit(Time now, Peer& peer, Call& call) {
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
  message.cookie = call.id;
  const std::uint64_t credit = call.stream ? call.stream->allowed : 0;
  const auto make = [&] {
    message.payload =
        with_head(CallHead{call.id, call.function, credit}, std::move(call.arguments));
    session::check(message, shared_.config.limits);
  };
  if (!guard(make, [&](const Error& refused) { fail(call.id, refused.code, refused.message); })) {
    return false;
  }
  // From here on it ends with the session, if that breaks.
  call.state = Call::State::sent;
  if (call.stream) call.stream->told = credit;
  peers_.guarded(peer, [&] {
    peers_.touch(peer);
    peer.session.send(now, std::move(message));
  });
  return true;
}

void Calls::flush(Time now, Peer& peer) {
  while (!peer.backlog.empty()) {
    const auto [id, lane] = peer.backlog.front();
    Call* call = find(id);
    if (call != nullptr && !transmit(now, peer, *call) && contains(id)) {
      return;  // the window is full again
    }
    peer.backlog.pop_front();
    peer.backlog_lanes.remove(lane);
  }
}

void Calls::delivered_result(Peer& peer, session::Deliver& delivered) {
  auto head = wire::decode<ResultHead>(delivered.payload.body);
  Call* call = find(head.id);
  if (call == nullptr) return;  // timed out or cancelled
  const bool asked = call->state == Call::State::sent && call->instance == peer.instance;
  if (!asked) return;
  Reply reply;
  if (head.error) {
    head.error->peer = call->receiver.text();  // as the caller names it, whatever the peer says
    reply = std::move(*head.error);
  } else if (delivered.error) {
    reply = call_error(delivered.error.code, delivered.error.message, *call, Ran::yes);
  } else {
    reply = user_payload(std::move(delivered.payload));
  }
  if (call->stream) {
    end_stream(*call, std::move(reply), head.items);
  } else {
    complete(head.id, std::move(reply));
  }
}

// ---- ends ----

void Calls::complete(CallId id, Reply result) {
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  const Call& call = found->second;
  if (auto* error = std::get_if<Error>(&result)) {
    if (error->peer.empty()) error->peer = call.receiver.text();
    if (error->function.empty()) error->function = call.function;
  }
  shared_.post(Complete{id, std::move(result)});
  const bool has_timer = call.deadline != kNever;
  calls_.erase(found);
  if (has_timer) shared_.timers.forget();
}

void Calls::fail(CallId id, ErrorCode code, std::string message) {
  complete(id, Error{.code = code, .message = std::move(message), .ran = Ran::no});
}

void Calls::fail_begun(CallId id, const Error& error) {
  Call* call = find(id);
  if (call == nullptr) return;
  if (call->state == Call::State::local) handlers_.stop({shared_.config.instance, id}, true);
  complete(id, call_error(error.code, error.message, *call, may_have_run(*call)));
}

void Calls::cancel(Time now, const Call& call) {
  stop_handler(now, call);
  complete(call.id, call_error(ErrorCode::cancelled,
                               "'" + call.function + "' at peer '" + call.receiver.text() +
                                   "' was cancelled",
                               call, may_have_run(call)));
}

void Calls::time_out(Time now, CallId id,
                     const std::function<std::string(const PeerName&)>& why_unreached) {
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
      const Peer* peer = peers_.find(call.instance);
      const bool silent = peer == nullptr || !peer->session.connected();
      text += silent ? ": the connection to the peer is lost" : ": the peer has not replied";
      break;
    }
    case Call::State::local:
      text += ": its handler, at this very peer, has not replied";
      break;
  }
  if (call.stream) stop_handler(now, call);
  complete(id, call_error(ErrorCode::timeout, std::move(text), call, may_have_run(call)));
}

// The caller does not wait any more.
void Calls::stop_handler(Time now, const Call& call) {
  if (call.state == Call::State::local) {
    handlers_.stop({shared_.config.instance, call.id}, true);
  } else if (call.state == Call::State::sent) {
    Peer* peer = peers_.find(call.instance);
    if (peer == nullptr) return;
    peers_.send(now, *peer, message_of(MessageKind::cancel, head_only(CancelHead{call.id})));
  }
}

void Calls::fail_all() {
  const Error closed =
      make_error(ErrorCode::closed, "this peer was closed while the call was under way");
  while (!calls_.empty()) fail_begun(calls_.begin()->first, closed);
}

void Calls::fail_all_of(Peer& peer, const session::Lost& lost) {
  std::map<CallId, Ran> ran;
  for (const session::LostMessage& message : lost.messages) {
    if (message.cookie != 0) ran[message.cookie] = message.written;
  }
  peer.backlog.clear();
  peer.backlog_lanes.clear();
  for (auto next = calls_.begin(); next != calls_.end();) {
    auto& [id, call] = *next++;
    if (call.instance != peer.instance) continue;
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

std::vector<PendingCall> Calls::pending(
    Time now, const std::function<std::string(const PeerName&)>& why_unreached) const {
  std::vector<PendingCall> pending;
  pending.reserve(calls_.size());
  for (const auto& [id, call] : calls_) {
    std::string state;
    switch (call.state) {
      case Call::State::searching:
        state = "the peer is not found (" + why_unreached(call.receiver) + "): is its name right?";
        break;
      case Call::State::waiting:
        state = "the peer takes no more calls now";
        break;
      case Call::State::sent:
        state = "sent";
        break;
      case Call::State::local:
        state = "runs here";
        break;
    }
    pending.push_back({id, call.receiver.text(), call.function, std::move(state),
                       now - call.started, call.deadline});
  }
  return pending;
}

// ---- streams ----

// The time-out runs while an item may come; a caller that takes no items has no time-out.
void Calls::await_items(Time now, Call& call) {
  const Call::Items& items = *call.stream;
  if (call.deadline != kNever) shared_.timers.forget();
  const bool may_come = items.taken + items.early.size() < items.allowed;
  const bool limited = items.timeout >= Duration(0) && items.timeout < kNever - now;
  call.deadline = may_come && limited ? now + items.timeout : kNever;
  arm(call);
}

void Calls::raise_credit(Time now, Call& call, std::uint64_t more) {
  call.stream->allowed += more;
  // Before the first item it might overtake the call; before the call is sent, the call carries it.
  const bool running = call.stream->taken > 0 || !call.stream->early.empty();
  if (running) tell_credit(now, call);
  if (call.state == Call::State::sent || call.state == Call::State::local) {
    await_items(now, call);
  }
}

void Calls::tell_credit(Time now, Call& call) {
  Call::Items& items = *call.stream;
  if (items.told == items.allowed) return;
  items.told = items.allowed;
  if (call.state == Call::State::local) {
    return handlers_.take_credit({shared_.config.instance, call.id}, items.allowed);
  }
  Peer* peer = peers_.find(call.instance);
  if (peer == nullptr) return;
  peers_.send(now, *peer,
              message_of(MessageKind::credit, head_only(CreditHead{call.id, items.allowed})));
}

void Calls::delivered_item(Time now, Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<StreamHead>(delivered.payload.body);
  Call* call = find(head.id);
  if (call == nullptr) return;  // cancelled or timed out
  if (call->state != Call::State::sent || call->instance != peer.instance) return;
  if (!call->stream) wire::fail("an item of a call that is no stream");
  if (delivered.error) {
    stop_handler(now, *call);
    Error error = delivered.error;
    error.ran = Ran::yes;
    complete(head.id, std::move(error));
    return;
  }
  take_item(now, *call, head.number, user_payload(std::move(delivered.payload)));
}

void Calls::take_item(Time now, Call& call, std::uint64_t number, wire::Payload item) {
  Call::Items& items = *call.stream;
  const bool expected =
      number >= items.taken && number < items.allowed && !(items.end && number >= items.end_after);
  if (!expected || !items.early.emplace(number, std::move(item)).second) {
    wire::fail("an item of a stream that was not asked for");
  }
  while (!items.early.empty() && items.early.begin()->first == items.taken) {
    shared_.post(StreamItem{call.id, std::move(items.early.begin()->second)});
    items.early.erase(items.early.begin());
    ++items.taken;
  }
  if (items.end && items.taken == items.end_after) {
    complete(call.id, std::move(*items.end));
    return;
  }
  tell_credit(now, call);
  await_items(now, call);
}

// The handler has replied; some items may still be in transit.
void Calls::end_stream(Call& call, Reply end, std::uint64_t count) {
  Call::Items& items = *call.stream;
  const bool possible =
      count <= items.allowed && !items.end &&
      count >= (items.early.empty() ? items.taken : items.early.rbegin()->first + 1);
  if (!possible) {
    wire::fail("a stream with another number of items than were sent");
  }
  if (count == items.taken) {
    complete(call.id, std::move(end));
    return;
  }
  items.end = std::move(end);
  items.end_after = count;
}

}  // namespace moolink::rpc
