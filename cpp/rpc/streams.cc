// Calls with many results: items that a handler sends before its reply, as many as the caller has
// allowed. Items and replies of one call travel unordered and are put in order here, so that a
// stream delays nothing and is delayed by nothing else.

#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "rpc/node.h"

namespace moolink::rpc {

// ---- at the caller ----

// The time-out runs while an item may come; a caller that takes no items has no time-out.
void Node::await_items(Time now, CallId id, Call& call) {
  const ItemsIn& items = *call.stream;
  if (call.deadline != kNever) forget_timer();
  const bool may_come = items.taken + items.early.size() < items.allowed;
  const bool limited = items.timeout >= Duration(0) && items.timeout < kNever - now;
  call.deadline = may_come && limited ? now + items.timeout : kNever;
  timers_.push({call.deadline, Timer::Kind::call, id, {}});
}

void Node::raise_credit(Time now, CallId id, std::uint64_t more) {
  const auto found = calls_.find(id);
  if (found == calls_.end() || !found->second.stream) return;  // it has ended
  Call& call = found->second;
  call.stream->allowed += more;
  // Before the first item it might overtake the call; before the call is sent, the call carries it.
  const bool running = call.stream->taken > 0 || !call.stream->early.empty();
  if (running) tell_credit(now, id, call);
  if (call.state == Call::State::sent || call.state == Call::State::local) {
    await_items(now, id, call);
  }
  settle(now);
}

void Node::tell_credit(Time now, CallId id, Call& call) {
  ItemsIn& items = *call.stream;
  if (items.told == items.allowed || mutant("credit_is_not_told")) return;
  items.told = items.allowed;
  if (call.state == Call::State::local) return take_credit({config_.instance, id}, items.allowed);
  Peer* peer = find_peer(call.instance);
  if (peer == nullptr) return;
  send_or_queue(now, *peer,
                message_of(MessageKind::credit, head_only(CreditHead{id, items.allowed})));
}

void Node::delivered_item(Time now, Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<StreamHead>(delivered.payload.body);
  const auto found = calls_.find(head.id);
  if (found == calls_.end()) return;  // cancelled or timed out
  Call& call = found->second;
  if (call.state != Call::State::sent || call.instance != peer.instance) return;
  if (!call.stream) wire::fail("an item of a call that is no stream");
  if (delivered.error) {
    stop_handler(now, head.id, call);
    Error error = delivered.error;
    error.ran = Ran::yes;
    complete(head.id, std::move(error));
    return;
  }
  take_item(now, head.id, call, head.number, user_payload(std::move(delivered.payload)));
}

void Node::take_item(Time now, CallId id, Call& call, std::uint64_t number, wire::Payload item) {
  ItemsIn& items = *call.stream;
  const bool expected =
      number >= items.taken && number < items.allowed && !(items.end && number >= items.end_after);
  if (!expected || !items.early.emplace(number, std::move(item)).second) {
    wire::fail("an item of a stream that was not asked for");
  }
  while (!items.early.empty() &&
         (items.early.begin()->first == items.taken || mutant("items_as_they_come"))) {
    actions_.push_back(StreamItem{id, std::move(items.early.begin()->second)});
    items.early.erase(items.early.begin());
    ++items.taken;
  }
  if (items.end && items.taken == items.end_after) {
    complete(id, std::move(*items.end));
    return;
  }
  tell_credit(now, id, call);
  await_items(now, id, call);
}

// The handler has replied; some items may still be in transit.
void Node::end_stream(CallId id, Call& call, Reply end, std::uint64_t count) {
  ItemsIn& items = *call.stream;
  const bool possible =
      count <= items.allowed && !items.end &&
      count >= (items.early.empty() ? items.taken : items.early.rbegin()->first + 1);
  if (!possible && !mutant("items_as_they_come")) {
    wire::fail("a stream with another number of items than were sent");
  }
  if (count == items.taken || mutant("end_overtakes_items")) {
    complete(id, std::move(end));
    return;
  }
  items.end = std::move(end);
  items.end_after = count;
}

// ---- at the handler ----

void Node::send_item(Time now, const CallKey& key, wire::Payload item) {
  const auto found = running_.find(key);
  if (found == running_.end()) return;  // the caller does not wait any more
  if (!found->second.stream || found->second.stream->sent >= found->second.stream->allowed) {
    throw Exception(ErrorCode::invalid_argument, "an item beyond the caller's credit");
  }
  ItemsOut& items = *found->second.stream;
  if (key.caller == config_.instance) {
    take_item(now, key.id, calls_.at(key.id), items.sent++, std::move(item));
    return settle(now);
  }
  send_or_queue(
      now, *find_peer(key.caller),
      message_of(MessageKind::stream, with_head(StreamHead{key.id, items.sent}, std::move(item))));
  ++items.sent;
  settle(now);
}

void Node::delivered_credit(const Peer& peer, session::Deliver& delivered) {
  const auto head = wire::decode<CreditHead>(delivered.payload.body);
  take_credit({peer.instance, head.id}, head.allowed);
}

void Node::take_credit(const CallKey& key, std::uint64_t allowed) {
  const auto found = running_.find(key);
  if (found == running_.end()) return;  // it has replied
  if (!found->second.stream) wire::fail("credit for a call that is no stream");
  if (allowed > found->second.stream->sent + kMostCredit) {
    wire::fail("a stream of too many items at once");
  }
  // Credits may overtake each other.
  if (allowed <= found->second.stream->allowed && !mutant("credit_goes_back")) return;
  found->second.stream->allowed = allowed;
  actions_.push_back(CreditRaised{key, allowed});
}

}  // namespace moolink::rpc
