// Calls, streams and services of a simulated process.

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/program.h"
#include "rpc/world.h"

namespace moolink::sim {

namespace {

std::uint64_t number_of(const wire::Payload& payload) {
  require(payload.body.size() >= 8, "arguments without a number");
  std::uint64_t number = 0;
  std::memcpy(&number, payload.body.data(), sizeof number);
  return number;
}

bool same_payload(const wire::Payload& a, const wire::Payload& b) {
  return same_bytes(a.body, b.body) &&
         std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(), same_bytes);
}

// Item `number` of a stream, from 1.
wire::Payload item_of(const CallRecord& record, std::uint64_t number) {
  const std::size_t size = (record.number * 31 + number * 17) % 7 == 0 ? 40'000 : 20 + number;
  return {make_bytes(record.number * 1000 + number, size), {}};
}

}  // namespace

void Process::perform(rpc::RunHandler& action) {
  const auto found = world_->calls.find(number_of(action.arguments));
  require(found != world_->calls.end(), "a handler runs for a call that nobody made");
  CallRecord& record = found->second;
  const std::string which = "call " + std::to_string(record.number);
  note("runs " + which);
  require(world_->may_meet(number, record.from_number), which + " was run for another group");
  require(scope().empty() || record.group.empty() || record.group == scope(),
          which + " was run in another group");
  require(!world_->knows_better(record, *this),
          which + " was run by the wrong one of two of the name");
  require(++record.runs == 1, which + " was run twice");
  record.ran_at = instance;
  require(record.peer == name && record.from == action.key.caller &&
              record.caller == action.caller && record.function == action.function &&
              action.function == "work",
          which + " was run at the wrong place");
  require(same_payload(record.arguments, action.arguments) || may_be_overwritten(record),
          which + " has wrong arguments");
  require(action.deadline > world_->simulation.now(), which + " was run after its time");
  if (record.lane != 0) {
    std::uint64_t& last = lane_order_[{action.key.caller, record.lane, record.group}];
    require(last < record.order, which + " was run before its turn in the lane");
    last = record.order;
  }
  if (action.key.caller != instance) {
    take(action.arguments);
  }
  running_[action.key] = &record;
  if (!record.handler_takes) return;
  const rpc::CallKey key = action.key;
  require((action.credit > 0) == (record.credit > 0), which + " is a stream at one side only");
  record.items_allowed_to_send = action.credit;
  world_->simulation.after(*record.handler_takes, [this, &record, key] {
    if (record.credit > 0) return send_items(record, key);
    finish_handler(record, key);
  });
}

// One item after the other, as credit allows; then the reply.
void Process::send_items(CallRecord& record, const rpc::CallKey& key) {
  if (!alive_) return;
  Simulation& simulation = world_->simulation;
  if (!awake()) {
    simulation.at(paused_until, [this, &record, key] { send_items(record, key); });
    return;
  }
  if (!running_.contains(key)) return;  // cancelled
  if (record.items_sent == record.items) return finish_handler(record, key);
  record.sender_waits = record.items_sent == record.items_allowed_to_send;
  if (record.sender_waits) return;
  ++record.items_sent;
  node_.send_item(simulation.now(), key, item_of(record, record.items_sent));
  act();
  simulation.after(simulation.between(Duration(0), milliseconds(1)),
                   [this, &record, key] { send_items(record, key); });
}

void Process::perform(rpc::CreditRaised& action) {
  const auto found = running_.find(action.key);
  require(found != running_.end(), "credit for a handler that does not run");
  CallRecord& record = *found->second;
  require(action.allowed > record.items_allowed_to_send, "credit that was given before");
  record.items_allowed_to_send = action.allowed;
  if (!std::exchange(record.sender_waits, false)) return;
  const rpc::CallKey key = action.key;
  world_->simulation.after(Duration(0), [this, &record, key] { send_items(record, key); });
}

void Process::perform(rpc::StreamItem& action) {
  CallRecord& record = *calls_.at(action.id);
  const std::string which = "call " + std::to_string(record.number);
  require(!record.done, which + " has an item after its end");
  require(++record.items_received <= record.items_allowed, which + " has more items than it takes");
  require(same_payload(action.item, item_of(record, record.items_received)),
          which + " has a wrong item, or one out of order");
  ++coverage["stream items"];
  record.last_progress = world_->simulation.now();
  world_->simulation.after(
      world_->simulation.between(Duration(0), world_->simulation.random.chance(1, 10)
                                                  ? milliseconds(300)
                                                  : milliseconds(2)),
      [this, &record] { use_item(record); });
}

// The user has taken an item: another one may come.
void Process::use_item(CallRecord& record) {
  if (!alive_ || record.done || closed_) return;
  if (!awake()) {
    world_->simulation.at(paused_until, [this, &record] { use_item(record); });
    return;
  }
  ++record.items_allowed;
  record.last_progress = world_->simulation.now();
  node_.raise_credit(world_->simulation.now(), record.id, 1);
  act();
}

void Process::finish_handler(CallRecord& record, const rpc::CallKey& key) {
  if (!alive_) return;
  if (!awake()) {
    world_->simulation.at(paused_until, [this, &record, key] { finish_handler(record, key); });
    return;
  }
  if (held_callers_.contains(key.caller)) {
    held_back_.emplace(key.caller, [this, &record, key] { finish_handler(record, key); });
    return;
  }
  if (running_.erase(key) == 0) return;  // cancelled
  record.replied = true;
  if (record.handler_fails) {
    Error error = make_error(ErrorCode::remote, "call " + std::to_string(record.number));
    error.remote_type = "ValueError";
    error.traceback = "at line 1";
    node_.reply(world_->simulation.now(), key, std::move(error));
  } else {
    node_.reply(world_->simulation.now(), key, lend(record, record.caller));
  }
  act();
}

void Process::perform(rpc::HoldHandlers& action) {
  if (action.hold) {
    require(held_callers_.insert(action.caller).second, "handlers were held back twice");
    ++coverage["handlers held back"];
    return;
  }
  require(held_callers_.erase(action.caller) == 1, "handlers were released that were not held");
  const auto [first, last] = held_back_.equal_range(action.caller);
  for (auto at = first; at != last; ++at) world_->simulation.after(Duration(0), at->second);
  held_back_.erase(first, last);
}

void Process::perform(rpc::CancelHandler& action) {
  const auto found = running_.find(action.key);
  require(found != running_.end(), "a handler was cancelled that does not run");
  found->second->cancel_seen = true;
  running_.erase(found);
}

void Process::perform(rpc::Complete& action) {
  const auto found = calls_.find(action.id);
  if (found == calls_.end()) {  // within call(): its record is told right afterwards
    const rpc::CallId id = action.id;
    auto result = std::make_shared<rpc::Complete>(std::move(action));
    world_->simulation.at(world_->simulation.now(), [this, id, result] {
      require(calls_.contains(id), "a result for a call that nobody made");
      perform(*result);
    });
    return;
  }
  CallRecord& record = *found->second;
  const std::string which = "call " + std::to_string(record.number);
  note("has a result of " + which);
  require(!record.done, which + " completed twice");
  record.done = true;
  const bool ended = record.replied && !record.cancelled;
  const auto* lost = std::get_if<Error>(&action.result);
  if (record.credit > 0 && ended && (lost == nullptr || lost->code == ErrorCode::remote)) {
    require(record.items_received == record.items, which + " has ended before its last item");
  }
  require(world_->simulation.now() - milliseconds(1) <= std::max(record.deadline, paused_until),
          which + " completed after its time");
  check_result(record, action.result);
  if (auto* payload = std::get_if<wire::Payload>(&action.result)) {
    if (record.peer != name) take(*payload);
  }
  if (const auto* error = std::get_if<Error>(&action.result)) record.error = *error;
}

void Process::check_result(const CallRecord& record, const rpc::Reply& result) const {
  const std::string which = "call " + std::to_string(record.number);
  if (const auto* payload = std::get_if<wire::Payload>(&result)) {
    require(record.runs == 1 && record.replied, which + " has a result, but was not run");
    require(!record.handler_fails &&
                (same_payload(record.arguments, *payload) || may_be_overwritten(record)),
            which + " has a wrong result");
    return;
  }
  const Error& error = std::get<Error>(result);
  const std::string peer = (record.group.empty() ? "" : record.group + "/") + record.peer;
  require(error.peer == peer && !error.message.empty(), which + " has a poor error");
  switch (error.code) {
    case ErrorCode::remote:
      require(record.handler_fails && error.traceback == "at line 1" &&
                  error.message == "call " + std::to_string(record.number),
              which + " has the error of another");
      break;
    case ErrorCode::no_such_function:
      require(record.function == "missing", which + " did not find its function");
      break;
    case ErrorCode::timeout:
      require(record.credit > 0 ? world_->simulation.now() >= record.last_progress + record.timeout
                                : world_->simulation.now() >= record.deadline,
              which + " timed out early");
      break;
    case ErrorCode::cancelled:
      require(record.cancelled, which + " was not cancelled by its caller");
      break;
    case ErrorCode::peer_lost:
      break;
    case ErrorCode::auth:
      require(world_->settings.outsider && record.runs == 0, which + " was refused by a friend");
      require(up_.empty() || claimed_.contains(record.peer),
              which + " was refused by somebody who does not have the peer's name");
      break;
    case ErrorCode::closed:
      require(false, which + " failed because somebody closed: " + error.message);
      break;
    case ErrorCode::error:  // its name is taken: by the one who died unnoticed, or it is an
                            // imposter; or it is not the only one of the name
      if (is_ambiguous(error)) {
        require(scope().empty() && record.group.empty() && record.runs == 0 &&
                    world_->namesake != nullptr && world_->namesake->name == record.peer,
                which + " does not find the only peer of the name");
        ++coverage["calls of a name that several bear"];
        break;
      }
      // A holder of the token does not reach the group in which another peer has its name.
      if (scope().empty() && world_->namesake != nullptr && world_->namesake->name == name) {
        require(record.runs == 0, which + " was run by a peer that its caller does not reach");
        ++coverage["calls to a group that has the caller's name"];
        break;
      }
      require(world_->imposter == this || !world_->settings.mild,
              which + " failed: " + error.message);
      break;
    default:
      require(false, which + " has an unexpected error: " + error.message);
  }
}

void Process::perform(rpc::ServiceMessage& action) {
  std::uint64_t count = 0;
  std::memcpy(&count, action.payload.body.data(), sizeof count);
  require(up_.contains(action.from), "a service message of a peer that is not up");
  std::uint64_t& received = services_[action.from].received;
  require(count == received + 1, "a service message was lost, repeated or out of order");
  received = count;
  ++coverage["service messages"];
}

void Process::perform(rpc::PeerUp& action) {
  note("sees " + action.name);
  require(up_.emplace(action.instance, action.name).second, "a peer came up twice");
  const auto bearers = std::count_if(
      up_.begin(), up_.end(), [&](const auto& entry) { return entry.second == action.name; });
  const bool has_namesake = world_->namesake != nullptr && world_->namesake->name == action.name;
  require(bearers == 1 || (has_namesake && bearers == 2), "two peers bear one name");
  up_since_[action.instance] = world_->simulation.now();
  require(action.same_host == (action.host_key == host_key()), "a wrong host");
  services_[action.instance] = {};
}

void Process::perform(rpc::Refused& action) {
  note("is refused: " + action.error.message);
  const bool name_taken = action.error.code == ErrorCode::error;
  require(name_taken || world_->settings.outsider, "a friend has refused the key");
  require(!name_taken || world_->has_met_namesake(*this), "the name of a dead peer is taken");
  if (name_taken) ++coverage["names taken"];
  require(!action.only_way || up_.empty(), "a peer that is up is a way to others");
  ++coverage["refusals"];
}

// Several short faults in a row can keep a peer from being heard for so long that an imposter may
// take its name.
bool Process::name_may_be_taken(const rpc::PeerDown& action) const {
  const Process* imposter = world_->imposter;
  if (imposter == nullptr || action.name != imposter->name) return false;
  if (action.how != rpc::Down::dead || action.instance == imposter->instance) return false;
  const auto heard = heard_.find(World::kVictim);
  return heard != heard_.end() &&
         world_->simulation.now() - heard->second >= session::Timing{}.suspect_after;
}

void Process::perform(rpc::PeerDown& action) {
  note("has lost " + action.name);
  require(up_.erase(action.instance) == 1, "a peer went down that was not up");
  // Both ends lose the session, and its calls: this run is not mild any more.
  if (name_may_be_taken(action)) world_->settings.mild = false;
  const bool closing = action.how == rpc::Down::closed;
  const auto is = [&](const Process* other) {
    return other != nullptr && action.instance == other->instance;
  };
  require(!world_->settings.mild || closing || world_->imposter == this || is(world_->imposter) ||
              is(world_->namesake),
          "a peer was given up by faults that are too short");
  require(action.how != rpc::Down::dead || !world_->runs(action.instance) ||
              (world_->imposter != nullptr && action.name == world_->imposter->name),
          "a peer that lives was called dead");
  ++coverage["peers down"];
}

void Process::perform(rpc::Log& action) {
  note(action.text);
  require(action.text.find("broke the protocol") == std::string::npos, action.text);
}

void Process::perform(rpc::Closed&) {
  require(!closed_, "closed twice");
  closed_ = true;
}

}  // namespace moolink::sim
