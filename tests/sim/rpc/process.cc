#include <algorithm>
#include <cstring>
#include <utility>

#include "base/names.h"
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
  config.max_queued_bytes = 100'000;
  return config;
}

crypto::Keyring keyring_of(const std::string& scope) {
  crypto::Key token;
  token.secret.fill(std::byte{42});
  return crypto::Keyring({scope.empty() ? token : token.of_group(scope)});
}

crypto::Digest seed_of(const Uid& instance) {
  return crypto::sha256(crypto::bytes_of("nonces of " + instance.hex()));
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
      authenticator_(keyring_of(scope()), "the simulation", seed_of(instance)),
      node_(config_of(world, number, name, instance, host_key()), allocator_, authenticator_) {}

Uid Process::host_key() const {
  const auto& hosts = world_->settings.hosts;
  const auto index = static_cast<std::size_t>(number);
  return {7, index < hosts.size() ? static_cast<std::uint64_t>(hosts[index]) + 1 : 9};
}

const std::string& Process::scope() const {
  static const std::string kNone;
  const auto index = static_cast<std::size_t>(number);
  return index < world_->settings.scopes.size() ? world_->settings.scopes[index] : kNone;
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
  started_at_ = world_->simulation.now();
  node_.listening(addresses());
  node_.define("work");
  if (number != 0) node_.connect(world_->simulation.now(), "tcp://10.0.0.0:1");
  act();
}

// ---- what the network tells ----

void Process::hear(ConnectionId connection) {
  heard_[world_->other_end(connection, number)] = world_->simulation.now();
}

void Process::received(ConnectionId connection, const wire::ReceivedFrame& frame) {
  if (!alive_) return;
  const wire::FrameType type = frame.header.type;
  const bool greets = type == wire::FrameType::hello || type == wire::FrameType::welcome ||
                      type == wire::FrameType::refuse;
  if (!greets) hear(connection);
  node_.received(world_->simulation.now(), connection, frame);
  act();
}

std::span<std::byte> Process::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  if (!alive_) return {};
  hear(connection);
  return node_.chunk_target(connection, head);
}

void Process::chunk_received(ConnectionId connection, const wire::ChunkHead& head) {
  if (!alive_) return;
  hear(connection);
  node_.event(&session::Session::chunk_received, world_->simulation.now(), connection, head);
  act();
}

void Process::closed(ConnectionId connection, const Error& error) {
  if (!alive_) return;
  node_.closed(world_->simulation.now(), connection, error);
  act();
}

void Process::writable(ConnectionId connection) {
  if (!alive_) return;
  node_.event(&session::Session::writable, world_->simulation.now(), connection);
  act();
}

void Process::grant_filled(ConnectionId connection, std::uint64_t grant) {
  if (!alive_) return;
  node_.event(&session::Session::grant_filled, world_->simulation.now(), connection, grant);
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
  record.from_number = number;
  record.began = world_->simulation.now();
  record.order = world_->next_order();
  if (timeout >= Duration(0)) record.deadline = world_->simulation.now() + timeout;
  wire::Payload arguments = lend(record, record.peer);
  const std::string peer =
      record.group.empty() ? record.peer : join_names({record.group, record.peer});
  if (record.credit == 0) {
    record.id = node_.call(world_->simulation.now(), peer, record.function, std::move(arguments),
                           timeout, record.lane);
  } else {
    record.timeout = timeout;
    record.deadline = kNever;
    record.last_progress = world_->simulation.now();
    record.items_allowed = record.credit;
    record.id = node_.call(world_->simulation.now(), peer, record.function, std::move(arguments),
                           timeout, record.lane, record.credit);
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
    const Time now = world_->simulation.now();
    const auto infos = node_.peers(now);
    const bool known = std::ranges::count(infos, other, &rpc::PeerInfo::instance) > 0;
    require(known, "a peer is up, but takes no service message");
    node_.send_service_to(now, other, to, rpc::Service::group, std::move(payload));
    act();
    return;
  }
}

// Its number is none that anybody waits for.
void Process::send_service_to_ended(const Uid& other, const std::string& name_of_successor) {
  const MutableBuffer bytes = HeapAllocator().allocate(8);
  std::memset(bytes.data(), 0, bytes.size());
  node_.send_service_to(world_->simulation.now(), other, name_of_successor, rpc::Service::group,
                        {bytes, {}});
  act();
}

void Process::close() {
  if (!alive_) return;
  node_.close(world_->simulation.now());
  act();
}

void Process::die(bool host_gone) {
  if (!alive_) return;
  alive_ = false;
  died_at_ = world_->simulation.now();
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

// No byte that is written names a peer that its receiver cannot meet, unless the writer cannot
// either: then its user has made the name up.
void Process::check_names(ConnectionId connection, const wire::Frame& frame) const {
  const int receiver = world_->other_end(connection, number);
  if (receiver < 0 || frame.header.type <= wire::FrameType::refuse) return;
  const auto scopes = static_cast<int>(world_->settings.scopes.size());
  for (int other = 1; other < scopes; ++other) {
    if (world_->has_namesake(other)) continue;
    if (world_->may_meet(receiver, other) || !world_->may_meet(number, other)) continue;
    const auto names_it = [peer = "peer" + std::to_string(other)](const Buffer& bytes) {
      const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return text.find(peer) != std::string_view::npos;
    };
    require(!names_it(frame.control) && std::ranges::none_of(frame.payload, names_it),
            name + " tells the name of a peer of another group");
  }
}

void Process::perform(rpc::Write& action) {
  world_->overhear(action.connection, action.frame);
  check_names(action.connection, action.frame);
  world_->network.write(action.connection, std::move(action.frame));
}

void Process::perform(rpc::CloseConnection& action) {
  note("closes " + std::to_string(action.connection) + ": " + action.error.message);
  world_->network.close(action.connection);
}

void Process::perform(rpc::AllocateGrant& action) {
  auto [place, memory] = world_->network.allocate_grant(action.connection, action.bytes);
  if (world_->simulation.random.chance(1, 10)) memory = {};  // none to be had
  node_.event(&session::Session::grant_ready, world_->simulation.now(), action.connection,
              action.seq, action.part, place, std::move(memory));
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
  node_.event(&session::Session::segments_passed, world_->simulation.now(), action.connection,
              action.seq, !world_->simulation.random.chance(1, 10));
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
  node_.event(&session::Session::loan_mapped, world_->simulation.now(), action.connection,
              action.seq, action.part, std::move(bytes), {});
}

void Process::perform(rpc::Dial& action) {
  Simulation& simulation = world_->simulation;
  const std::string address = action.address;
  simulation.after(simulation.between(microseconds(10), milliseconds(2)), [this, address] {
    if (!alive_ || closed_) return;
    Process* other = world_->listener(address);
    if (other != nullptr && world_->outsider_takes_dial()) {
      const auto [ours, theirs] =
          world_->network.connect(*this, world_->outsider, world_->settings.tcp);
      world_->outsider.dialled_by(theirs);
      opened(ours, world_->settings.tcp, address);
      return;
    }
    require(other == nullptr || world_->may_meet(number, other->number),
            name + " dials a peer of another group");
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
      world_->connected(ours, theirs, number, other->number);
      other->opened(theirs, path, "");
      opened(ours, path, address);
    }
  });
}

}  // namespace moolink::sim
