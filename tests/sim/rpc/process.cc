#include <algorithm>
#include <cstring>
#include <utility>

#include "base/mutant.h"
#include "common/program.h"
#include "rpc/world.h"

namespace moolink::sim {

namespace {

rpc::Config config_of(const World& world, int, const std::string& name, Uid instance, Uid host) {
  rpc::Config config;
  config.instance = instance;
  config.name = name;
  config.host_key = host;
  config.limits = world.settings.limits;
  config.max_running_calls = 8;
  return config;
}

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

wire::Payload copy_of(const wire::Payload& payload) {
  const auto copy = [](const Buffer& bytes) {
    const MutableBuffer result = HeapAllocator().allocate(bytes.size());
    if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), bytes.size());
    return Buffer(result);
  };
  wire::Payload result{copy(payload.body), {}};
  for (const Buffer& part : payload.parts) result.parts.push_back(copy(part));
  return result;
}

}  // namespace

Process::Process(World& world, int number_is, std::string name_is, Uid instance_is)
    : number(number_is),
      name(std::move(name_is)),
      instance(instance_is),
      world_(&world),
      node_(config_of(world, number, name, instance, host_key()), allocator_, policy_,
            world.simulation.random.next()) {}

Uid Process::host_key() const {
  const auto& hosts = world_->settings.hosts;
  const auto index = static_cast<std::size_t>(number);
  return {7, index < hosts.size() ? static_cast<std::uint64_t>(hosts[index]) + 1 : 9};
}

std::vector<std::string> Process::addresses() const {
  return {"tcp://10.0.0." + std::to_string(number) + ":1", "shm://host/" + std::to_string(number)};
}

void Process::note(const std::string& what) const {
  world_->simulation.note(name + (world_->imposter == this ? " (imposter)" : "") + ": " + what);
}

bool Process::awake() const { return alive_ && paused_until <= world_->simulation.now(); }

void Process::start() {
  if (!alive_) return;
  if (!awake()) {
    world_->simulation.at(paused_until, [this] { start(); });
    return;
  }
  node_.listening(addresses());
  node_.define("work");
  if (number != 0) node_.connect(world_->simulation.now(), "tcp://10.0.0.0:1");
  act();
}

// ---- what the network tells ----

void Process::received(ConnectionId connection, const wire::ReceivedFrame& frame) {
  if (!alive_) return;
  node_.received(world_->simulation.now(), connection, frame);
  act();
}

std::span<std::byte> Process::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  return alive_ ? node_.chunk_target(connection, head) : std::span<std::byte>{};
}

void Process::chunk_received(ConnectionId connection, const wire::ChunkHead& head) {
  if (!alive_) return;
  node_.chunk_received(world_->simulation.now(), connection, head);
  act();
}

void Process::closed(ConnectionId connection, const Error& error) {
  if (!alive_) return;
  node_.closed(world_->simulation.now(), connection, error);
  act();
}

void Process::writable(ConnectionId connection) {
  if (!alive_) return;
  node_.writable(world_->simulation.now(), connection);
  act();
}

void Process::grant_filled(ConnectionId connection, std::uint64_t grant) {
  if (!alive_) return;
  node_.grant_filled(world_->simulation.now(), connection, grant);
  act();
}

void Process::opened(ConnectionId connection, const Path& path, const std::string& dialled) {
  node_.opened(world_->simulation.now(), connection, path.kind, path.traits, dialled);
  act();
}

void Process::dial_failed(const std::string& address, const Error& error) {
  if (!alive_) return;
  node_.dial_failed(world_->simulation.now(), address, error);
  act();
}

// ---- what the user does ----

void Process::call(CallRecord& record, Duration timeout) {
  if (!alive_) return;
  record.from = instance;
  record.order = world_->next_order();
  if (timeout >= Duration(0)) record.deadline = world_->simulation.now() + timeout;
  wire::Payload arguments = lend(record, record.peer);
  if (record.credit == 0) {
    record.id = node_.call(world_->simulation.now(), record.peer, record.function,
                           std::move(arguments), timeout, record.lane);
  } else {
    record.timeout = timeout;
    record.deadline = kNever;
    record.last_progress = world_->simulation.now();
    record.items_allowed = record.credit;
    record.id = node_.stream(world_->simulation.now(), record.peer, record.function,
                             std::move(arguments), timeout, record.lane, record.credit);
  }
  calls_[record.id] = &record;
  note("calls " + record.peer + ", call " + std::to_string(record.number));
  act();
}

void Process::cancel(CallRecord& record) {
  if (!alive_ || record.done) return;
  if (!awake()) {
    world_->simulation.at(paused_until, [this, &record] { cancel(record); });
    return;
  }
  note("cancels call " + std::to_string(record.number));
  record.cancelled = true;
  node_.cancel(world_->simulation.now(), record.id);
  act();
  require(record.done, "a cancelled call was not completed at once");
}

// A number that rises by one for each message to an instance.
void Process::send_service(const std::string& to) {
  for (const auto& [other, other_name] : up_) {
    if (other_name != to) continue;
    wire::Payload payload;
    const MutableBuffer bytes =
        HeapAllocator().allocate(8 + world_->simulation.random.below(40'000));
    const std::uint64_t count = ++services_[other].sent;
    std::memset(bytes.data(), 0, bytes.size());
    std::memcpy(bytes.data(), &count, sizeof count);
    payload.body = bytes;
    const bool sent = node_.send_service(world_->simulation.now(), other, rpc::Service::group,
                                         std::move(payload));
    require(sent, "a peer is up, but takes no service message");
    act();
    return;
  }
}

void Process::close() {
  if (!alive_) return;
  node_.close(world_->simulation.now());
  act();
}

void Process::die(bool host_gone) {
  if (!alive_) return;
  alive_ = false;
  world_->network.crash(*this, host_gone);
}

// ---- what the node wants done ----

void Process::act() {
  std::vector<rpc::Action> actions;
  actions.swap(actions_);
  for (node_.drain(actions); !actions.empty(); node_.drain(actions)) {
    for (rpc::Action& action : actions) {
      std::visit([this](auto& which) { perform(which); }, action);
    }
  }
  actions_.swap(actions);
  arm();
}

void Process::arm() {
  const Time next = node_.next_deadline();
  if (next >= timer_ || next == kNever || closed_) return;
  timer_ = next;
  const std::uint64_t token = ++timer_token_;
  world_->simulation.at(next, [this, token] {
    if (token == timer_token_) on_tick();
  });
}

void Process::on_tick() {
  if (!alive_) return;
  if (!awake()) {
    world_->simulation.at(paused_until, [this] { on_tick(); });
    return;
  }
  timer_ = kNever;
  node_.tick(world_->simulation.now());
  act();
}

void Process::perform(rpc::Write& action) {
  world_->network.write(action.connection, std::move(action.frame));
}

void Process::perform(rpc::CloseConnection& action) {
  note("closes " + std::to_string(action.connection) + ": " + action.error.message);
  world_->network.close(action.connection);
}

void Process::perform(rpc::AllocateGrant& action) {
  auto [place, memory] = world_->network.allocate_grant(action.connection, action.bytes);
  if (world_->simulation.random.chance(1, 10)) memory = {};  // none to be had
  node_.grant_ready(world_->simulation.now(), action.connection, action.seq, action.part, place,
                    std::move(memory));
}

void Process::perform(rpc::FillGrant& action) {
  world_->network.fill_grant(action.connection, action.place, action.bytes);
}

// The arguments, or the result, which is equal to them.
wire::Payload Process::lend(const CallRecord& record, const std::string& to) {
  wire::Payload payload = copy_of(record.arguments);
  if (!record.lends) return payload;
  for (std::size_t i = 0; i < payload.parts.size(); ++i) {
    if (payload.parts[i].empty()) continue;
    auto [bytes, lent] =
        world_->lending.lend(payload.parts[i], static_cast<std::uint32_t>(i), [this] {
          return world_->settings.mild && !world_->settings.imposter && alive_ && !closed_;
        });
    payload.parts[i] = std::move(bytes);
    payload.lent.push_back(lent);
  }
  note("lends to " + to);
  return payload;
}

// Who was stopped for so long that it was given up finds, when it wakes, messages whose lent parts
// are their lender's again. tests/sim/session knows exactly when; here it is enough that no session
// is lost in mild runs.
bool Process::may_be_overwritten(const CallRecord& record) const {
  return record.lends && !world_->settings.mild;
}

// What has come: this process' own memory, or what it refers to for a while.
void Process::take(const wire::Payload& payload) {
  Simulation& simulation = world_->simulation;
  for (std::size_t i = 0; i < payload.parts.size(); ++i) {
    const Buffer& part = payload.parts[i];
    const wire::LentPart* lent = payload.find_lent(i);
    if (lent != nullptr && !lent->copied) {
      simulation.after(simulation.between(Duration(0), milliseconds(600)), [part] { (void)part; });
    } else if (part.size() > session::kInlineTotal) {
      memory_.take(part);
    }
  }
}

void Process::check_loans() const {
  for (const rpc::PeerInfo& peer : node_.peers(world_->simulation.now())) {
    require(peer.loans_given == 0, name + " has lent to " + peer.name + " what is not returned");
    require(peer.loans_held == 0, name + " has not returned what " + peer.name + " has lent");
  }
}

void Process::perform(rpc::PassSegments& action) {
  node_.segments_passed(world_->simulation.now(), action.connection, action.seq,
                        !world_->simulation.random.chance(1, 10));
}

void Process::perform(rpc::MapLoan& action) {
  const Uid lender = node_.instance_of(action.connection);
  Buffer bytes = world_->lending.borrow(
      action.place, [this, lender, session = action.session, loan = action.place.loan] {
        if (!alive_) return;
        const std::uint64_t loans[] = {loan};
        node_.return_loans(world_->simulation.now(), lender, session, loans);
        act();
      });
  node_.loan_mapped(world_->simulation.now(), action.connection, action.seq, action.part,
                    std::move(bytes), {});
}

void Process::perform(rpc::Dial& action) {
  Simulation& simulation = world_->simulation;
  const std::string address = action.address;
  simulation.after(simulation.between(microseconds(10), milliseconds(2)), [this, address] {
    if (!alive_ || closed_) return;
    Process* other = world_->listener(address);
    const bool shm = address.starts_with("shm");
    if (other == nullptr || !other->alive() || other->is_closed()) {
      dial_failed(address, make_error(ErrorCode::peer_lost, "nobody listens there"));
    } else if (shm && other->host_key() != host_key()) {
      dial_failed(address, make_error(ErrorCode::error, "another host"));
    } else if (world_->partitioned(number, other->number)) {
      dial_failed(address, make_error(ErrorCode::timeout, "no answer"));
    } else {
      const Path& path = shm ? world_->settings.shm : world_->settings.tcp;
      const auto [ours, theirs] = world_->network.connect(*this, *other, path);
      other->opened(theirs, path, "");
      opened(ours, path, address);
    }
  });
}

void Process::perform(rpc::RunHandler& action) {
  const auto found = world_->calls.find(number_of(action.arguments));
  require(found != world_->calls.end(), "a handler runs for a call that nobody made");
  CallRecord& record = found->second;
  const std::string which = "call " + std::to_string(record.number);
  note("runs " + which);
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
    std::uint64_t& last = lane_order_[{action.key.caller, record.lane}];
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
  require(error.peer == record.peer && !error.message.empty(), which + " has a poor error");
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
    case ErrorCode::closed:
      require(false, which + " failed because somebody closed: " + error.message);
      break;
    case ErrorCode::error:  // its name is taken: by the one who died unnoticed, or it is an
                            // imposter
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
  require(bearers == 1, "two peers bear one name");
  require(action.same_host == (action.host_key == host_key()), "a wrong host");
  services_[action.instance] = {};
}

void Process::perform(rpc::PeerDown& action) {
  note("has lost " + action.name);
  require(up_.erase(action.instance) == 1, "a peer went down that was not up");
  const bool closing = action.how == rpc::Down::closed;
  require(!world_->settings.mild || closing || world_->imposter == this ||
              (world_->imposter != nullptr && action.instance == world_->imposter->instance),
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
