#include "rpc/handlers.h"

#include <algorithm>
#include <utility>

#include "rpc/messages.h"

namespace moolink::rpc {

namespace {

constexpr std::size_t kEarlyCancels = 1024;  // remembered for one peer

}  // namespace

void Handlers::run_here(CallId id, const std::string& function, wire::Payload arguments,
                        Time deadline, std::uint64_t credit) {
  const CallKey key{shared_.config.instance, id};
  Running& running = running_[key];
  running.bytes = arguments.bytes();
  if (credit > 0) {
    running.stream = Items{credit, 0};
  } else {
    running.deadline = deadline;
    shared_.timers.push({deadline, Timer::Kind::handler, id, shared_.config.instance});
  }
  shared_.post(RunHandler{
      key, shared_.config.name, function, std::move(arguments), running.deadline, credit, {}});
}

void Handlers::delivered_call(Time now, Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<CallHead>(delivered.payload.body);
  const auto early = std::ranges::find(peer.early_cancels, head.id);
  if (early != peer.early_cancels.end()) {
    peer.early_cancels.erase(early);
    return;
  }
  if (delivered.deadline <= now) return;  // no waiting caller
  const std::string& name = shared_.config.name;
  const auto fail = [&](ErrorCode code, std::string text) {
    send_result(
        now, peer, head.id,
        Error{.code = code, .message = std::move(text), .peer = name, .function = head.function});
  };
  if (delivered.error) return fail(delivered.error.code, delivered.error.message);
  // Closed is an error of the caller's own objects.
  if (shared_.closing) return fail(ErrorCode::peer_lost, "peer '" + name + "' closes");
  const auto function = functions_.find(head.function);
  if (function == functions_.end() || !peer.may_concern(function->second)) {
    return fail(ErrorCode::no_such_function,
                "peer '" + name + "' has no function '" + head.function + "'");
  }
  if (head.credit > kMostCredit) wire::fail("a stream of too many items at once");
  const CallKey key{peer.instance, head.id};
  wire::Payload arguments = user_payload(std::move(delivered.payload));
  const std::size_t bytes = arguments.cost();
  if (ignores_window(peer, bytes)) wire::fail("calls beyond the window");
  Running running{delivered.deadline, bytes, {}};
  const std::string group = arguments.from_guest ? peer.scope : std::string();
  if (head.credit > 0) running.stream = Items{head.credit, 0};
  shared_.post(RunHandler{key, peer.name, head.function, std::move(arguments), delivered.deadline,
                          head.credit, group});
  if (!running_.try_emplace(key, running).second) {
    shared_.actions.pop_back();
    wire::fail("a call's id was used twice");
  }
  ++peer.running;
  peer.running_bytes += bytes;
  shared_.timers.push({delivered.deadline, Timer::Kind::handler, head.id, peer.instance});
}

void Handlers::delivered_cancel(Peer& peer, const session::Deliver& delivered) {
  const auto head = wire::decode<CancelHead>(delivered.payload.body);
  const CallKey key{peer.instance, head.id};
  if (running_.contains(key)) {
    stop(key, true);
    return;
  }
  peer.early_cancels.push_back(head.id);  // or the reply is in transit: then it is never looked up
  if (peer.early_cancels.size() > kEarlyCancels) peer.early_cancels.pop_front();
}

void Handlers::delivered_credit(const Peer& peer, const session::Deliver& delivered) {
  const auto head = wire::decode<CreditHead>(delivered.payload.body);
  take_credit({peer.instance, head.id}, head.allowed);
}

void Handlers::take_credit(const CallKey& key, std::uint64_t allowed) {
  const auto found = running_.find(key);
  if (found == running_.end()) return;  // it has replied
  std::optional<Items>& items = found->second.stream;
  if (!items) wire::fail("credit for a call that is no stream");
  if (allowed > items->sent + kMostCredit) wire::fail("a stream of too many items at once");
  // Credits may overtake each other.
  if (allowed <= items->allowed) return;
  items->allowed = allowed;
  shared_.post(CreditRaised{key, allowed});
}

Handlers::Items* Handlers::within_credit(const CallKey& key) {
  const auto found = running_.find(key);
  if (found == running_.end()) return nullptr;
  std::optional<Items>& items = found->second.stream;
  if (!items || items->sent >= items->allowed) {
    throw Exception(ErrorCode::invalid_argument, "an item beyond the caller's credit");
  }
  return &*items;
}

std::optional<std::uint64_t> Handlers::number_item(const CallKey& key) {
  Items* items = within_credit(key);
  if (items == nullptr) return std::nullopt;
  return items->sent++;
}

bool Handlers::send_item(Time now, const CallKey& key, wire::Payload item) {
  Items* items = within_credit(key);
  if (items == nullptr) return false;
  const StreamHead head{key.id, items->sent};
  peers_.send(now, *peers_.find(key.caller),
              message_of(MessageKind::stream, with_head(head, std::move(item))));
  ++items->sent;
  return true;
}

std::optional<std::uint64_t> Handlers::end(const CallKey& key) {
  const auto found = running_.find(key);
  if (found == running_.end()) return std::nullopt;
  const std::uint64_t items = found->second.stream ? found->second.stream->sent : 0;
  stop(key, false);
  return items;
}

void Handlers::send_result(Time now, Peer& peer, CallId id, Reply reply, std::uint64_t items) {
  session::OutgoingMessage message;
  message.kind = static_cast<std::uint8_t>(MessageKind::result);
  const bool made = peers_.guarded(peer, [&] {
    if (auto* error = std::get_if<Error>(&reply)) {
      message.payload = head_only(ResultHead{id, std::move(*error), items});
    } else {
      message.payload =
          with_head(ResultHead{id, {}, items}, std::move(std::get<wire::Payload>(reply)));
    }
  });
  if (!made) return;
  try {
    peers_.send(now, peer, std::move(message));
  } catch (const Exception& refused) {
    send_result(
        now, peer, id,
        make_error(ErrorCode::error, "the result cannot be sent: " + refused.error().message),
        items);
  }
}

void Handlers::stop(const CallKey& key, bool tell_handler) {
  const auto found = running_.find(key);
  if (found == running_.end()) return;
  if (tell_handler) shared_.post(CancelHandler{key});
  const Running running = found->second;
  if (Peer* peer = peers_.find(key.caller)) {
    peers_.guarded(*peer, [&] { peers_.touch(*peer); });
    --peer->running;
    peer->running_bytes -= running.bytes;
  }
  running_.erase(found);
  if (running.deadline != kNever) shared_.timers.forget();
}

void Handlers::stop_all_of(const Uid& caller) {
  for (auto next = running_.lower_bound({caller, 0});
       next != running_.end() && next->first.caller == caller;) {
    const CallKey key = next++->first;
    stop(key, true);
  }
}

// Calls in transit when the peer was told to hold its calls fit its send window: a peer that sends
// several times that ignores it, and would make this side hold any number of calls.
bool Handlers::ignores_window(Peer& peer, std::size_t bytes) const {
  constexpr std::size_t kTimes = 4;  // paths may change meanwhile
  if (!peer.held) return false;
  const Limits& limits = shared_.config.limits;
  // A call larger than the window is one of those that may be in transit.
  peer.bytes_since_held += std::min(bytes, limits.send_window_bytes);
  return ++peer.calls_since_held > kTimes * limits.send_window_messages ||
         peer.bytes_since_held > kTimes * limits.send_window_bytes;
}

void Handlers::balance_handlers(Peer& peer) {
  const bool over = peer.queued_bytes > shared_.config.max_queued_bytes;
  const bool under = peer.queued_bytes <= shared_.config.max_queued_bytes / 2;
  if (over == peer.handlers_held || (peer.handlers_held && !under)) return;
  shared_.post(HoldHandlers{peer.instance, over});
  peer.handlers_held = over;
}

void Handlers::balance_window(Time now, Peer& peer) {
  const Config& config = shared_.config;
  // Messages that its calls caused and that could not be sent yet count with them.
  const std::size_t calls = peer.running + peer.queued.size();
  const std::size_t bytes = peer.running_bytes + peer.queued_bytes;
  const bool over = calls > config.max_running_calls || bytes > config.max_running_bytes;
  const bool under = calls <= config.max_running_calls / 2 && bytes <= config.max_running_bytes / 2;
  if (over == peer.held || (peer.held && !under)) return;
  peer.held = over;
  peer.calls_since_held = peer.bytes_since_held = 0;
  peer.session.set_receive_window(now, config.limits.send_window_bytes,
                                  over ? 0 : config.limits.send_window_messages);
}

}  // namespace moolink::rpc
