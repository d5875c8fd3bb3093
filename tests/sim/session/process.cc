#include <algorithm>
#include <cstring>
#include <utility>

#include "common/program.h"
#include "session/world.h"

namespace moolink::sim {

using session::Session;

Process::Process(World& world, int side_of, Uid instance_of)
    : side(side_of), instance(instance_of), world_(&world) {}

void Process::note(const std::string& what) const {
  world_->simulation.note((side == 0 ? "left: " : "right: ") + what);
}

wire::Hello Process::hello() const {
  wire::Hello hello;
  hello.instance = instance;
  hello.name = side == 0 ? "left" : "right";
  hello.max_frame = world_->settings.limits.max_frame;
  return hello;
}

void Process::opened(ConnectionId connection, const Path& path, bool dialled) {
  greetings_[connection] = {path, dialled, false};
  if (dialled) {
    world_->network.write(connection, wire::make_frame(wire::FrameType::hello, hello()));
  }
  // A greeting that does not come to an end is given up.
  world_->simulation.after(seconds(2), [this, connection] {
    const auto greeting = greetings_.find(connection);
    if (!alive_ || greeting == greetings_.end() || greeting->second.handed_over) return;
    greetings_.erase(greeting);
    world_->network.close(connection);
  });
}

bool Process::has_path(wire::PathKind kind) const {
  return std::any_of(greetings_.begin(), greetings_.end(), [&](const auto& entry) {
    return entry.second.dialled && entry.second.path.kind == kind;
  });
}

// The other side's process is known: a session with it, and none with an earlier one.
void Process::meet(const Uid& other) {
  if (other_ == other) return;
  if (session_) {
    session_->end(make_error(ErrorCode::peer_lost, "restarted"), false);
    act();
  }
  other_ = other;
  lane_order_.clear();
  session::Config config;
  config.self = instance;
  config.peer = other;
  config.limits = world_->settings.limits;
  session_ = std::make_unique<Session>(std::move(config), allocator_);
}

void Process::greet(ConnectionId connection, Greeting& greeting, const wire::ReceivedFrame& frame) {
  const wire::Hello theirs = wire::decode_hello(frame.control());
  if (world_->dead.contains(theirs.instance)) return;  // what it said before it died
  if (!greeting.dialled && frame.header.type == wire::FrameType::hello) {
    world_->network.write(connection, wire::make_frame(wire::FrameType::hello, hello()));
    return;
  }
  meet(theirs.instance);
  greeting.handed_over = true;
  const Time now = world_->simulation.now();
  session_->attach(now, connection, greeting.path.kind, greeting.path.traits, greeting.dialled,
                   hello());
  if (!greeting.dialled) session_->received(now, connection, frame);
}

void Process::received(ConnectionId connection, const wire::ReceivedFrame& frame) {
  if (!alive_) return;
  const auto greeting = greetings_.find(connection);
  if (greeting == greetings_.end()) return;
  if (!greeting->second.handed_over) {
    greet(connection, greeting->second, frame);
  } else {
    session_->received(world_->simulation.now(), connection, frame);
  }
  act();
}

std::span<std::byte> Process::chunk_target(ConnectionId connection, const wire::ChunkHead& head) {
  if (!alive_ || !greetings_.contains(connection)) return {};
  return session_->chunk_target(connection, head);
}

void Process::chunk_received(ConnectionId connection, const wire::ChunkHead& head) {
  if (!alive_ || !greetings_.contains(connection)) return;
  session_->chunk_received(world_->simulation.now(), connection, head);
  act();
}

void Process::closed(ConnectionId connection, const Error&) {
  if (!alive_ || greetings_.erase(connection) == 0) return;
  note("lost connection " + std::to_string(connection));
  if (!session_) return;
  session_->disconnected(world_->simulation.now(), connection);
  act();
}

void Process::writable(ConnectionId connection) {
  if (!alive_ || !greetings_.contains(connection)) return;
  session_->writable(world_->simulation.now(), connection);
  act();
}

void Process::grant_filled(ConnectionId connection, std::uint64_t grant) {
  if (!alive_ || !greetings_.contains(connection)) return;
  session_->grant_filled(world_->simulation.now(), connection, grant);
  act();
}

void Process::send(Message& message) {
  waiting_.push_back(&message);
  pump();
}

void Process::hold_calls(bool hold) {
  if (!alive_ || !session_ || paused_until > world_->simulation.now()) return;
  session_->set_receive_window(world_->simulation.now(), world_->settings.limits.send_window_bytes,
                               hold ? 0 : 100);
  act();
}

void Process::end_session() {
  if (!alive_ || !session_ || paused_until > world_->simulation.now()) return;
  ++coverage["sessions ended by a side"];
  session_->end(make_error(ErrorCode::error, "a message cannot be sent"), false);
  act();
}

// What the window refused before, in order.
void Process::pump() {
  if (!alive_ || !session_ || !session_->ready()) return;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Message& message = **it;
    session::OutgoingMessage outgoing;
    outgoing.lane = message.lane;
    outgoing.kind = message.kind;
    outgoing.held = message.kind == 1;
    outgoing.deadline = message.deadline;
    outgoing.cookie = message.number;
    message.from = instance;
    message.to = other_;
    message.session = session_->id();
    outgoing.payload = lend(message);
    place(message, outgoing.payload);
    message.order = ++world_->orders;
    if (!session_->send(world_->simulation.now(), std::move(outgoing))) {
      ++coverage["window full"];
      break;
    }
    message.state = Message::State::sent;
    note("sent " + std::to_string(message.number));
    it = waiting_.erase(it);
  }
  act();
}

// The payload as it is sent: the parts that are lent lie in memory that must come back.
wire::Payload Process::lend(Message& message) {
  wire::Payload payload = message.payload;
  message.segments.clear();
  for (const std::uint32_t part : message.lent) {
    const std::uint64_t session = message.session;
    auto [bytes, lent] =
        world_->lending.lend(payload.parts[part], part, [this, session, to = other_] {
          return !world_->lost_sessions.contains(session) && !world_->dead.contains(to) &&
                 !world_->dead.contains(instance);
        });
    message.segments.push_back(lent.segment);
    if (message.unmappable.contains(part)) lent.segment = 0;
    payload.parts[part] = std::move(bytes);
    payload.lent.push_back(lent);
  }
  return payload;
}

// Some parts are captured into memory that the other side has given; and once in a while for a
// message that is never sent.
void Process::place(const Message& message, wire::Payload& payload) {
  for (std::uint32_t part = 0; part < payload.parts.size(); ++part) {
    const std::size_t size = payload.parts[part].size();
    if (message.lent.contains(part) || world_->simulation.random.chance(1, 4)) continue;
    const auto taken = session_->take_preposted(world_->simulation.now(), size);
    if (!taken) continue;
    const ConnectionId connection = taken->connection;
    const std::uint64_t grant = taken->place.grant;
    // Through the loop, as the runtime does: the last reference may go inside of the session.
    auto held = std::make_shared<HeldGrant>(connection, grant, [this, connection, grant] {
      ++coverage["standing grants released unused"];
      world_->simulation.after(Duration(0), [this, connection, grant] {
        if (!alive_) return;
        session_->release_preposted(world_->simulation.now(), connection, grant);
        act();
      });
    });
    if (world_->simulation.random.chance(1, 8)) continue;
    ++coverage["parts placed"];
    sim::place(payload, part, world_->network.grant_memory(connection, taken->place),
               std::move(held));
  }
}

void Process::pass(const session::PassSegments& action) {
  const bool possible = !world_->simulation.random.chance(1, 10);
  coverage["segments not passed"] += possible ? 0 : 1;
  for (const std::uint64_t segment : action.segments) {
    if (possible) world_->passed.emplace(action.connection, segment);
  }
  session_->segments_passed(world_->simulation.now(), action.connection, action.seq, possible);
}

void Process::map(const session::MapLoan& action) {
  const ConnectionId lenders = ((action.connection - 1) ^ 1) + 1;  // the other end
  require(world_->passed.contains({lenders, action.place.segment}),
          "a loan lies in a segment that its connection was not passed");
  Buffer bytes;
  Error error;
  if (world_->simulation.random.chance(1, 50)) {
    error = make_error(ErrorCode::error, "no memory");
    for (auto& [number, message] : world_->messages) {
      const auto& segments = message.segments;
      if (std::find(segments.begin(), segments.end(), action.place.segment) != segments.end()) {
        message.not_mapped = true;
      }
    }
  } else {
    bytes = world_->lending.borrow(
        action.place, [this, lender = other_, session = action.session, loan = action.place.loan] {
          if (lender == other_) return_loan(session, loan);
        });
  }
  session_->loan_mapped(world_->simulation.now(), action.connection, action.seq, action.part,
                        std::move(bytes), error);
}

void Process::return_loan(std::uint64_t session, std::uint64_t loan) {
  if (!alive_) return;
  const std::uint64_t loans[] = {loan};
  session_->return_loans(world_->simulation.now(), session, loans);
  act();
}

// What a user refers to for a while. A stopped process does not let go.
void Process::hold(const Buffer& buffer) {
  Simulation& simulation = world_->simulation;
  const Time until =
      std::max(simulation.now(), paused_until) + simulation.between(Duration(0), milliseconds(600));
  simulation.at(until, [this, buffer] {
    if (alive_ && paused_until > world_->simulation.now()) hold(buffer);
  });
}

void Process::check_at_end() const {
  memory_.check();
  if (!alive_ || !session_ || !session_->ready()) return;
  require(session_->loans_given() == 0, "loans are left that were not returned");
  require(session_->loans_held() == 0, "loans are left that nobody holds");
  require(session_->preposted() == 0, "grants stand that are not used");
}

void Process::die(bool host_gone) {
  if (!alive_) return;
  alive_ = false;
  world_->dead.insert(instance);
  if (session_id_ != 0) world_->lost_sessions.insert(session_id_);
  world_->network.crash(*this, host_gone);
}

void Process::act() {
  if (!session_) return;
  std::vector<session::Action> actions;
  actions.swap(actions_);
  bool opened = false;
  session_->drain(actions);
  for (session::Action& action : actions) {
    if (auto* write = std::get_if<session::Write>(&action)) {
      check_written(*write);
      world_->network.write(write->connection, std::move(write->frame));
    } else if (auto* delivered = std::get_if<session::Deliver>(&action)) {
      deliver(*delivered);
    } else if (auto* acked = std::get_if<session::Acked>(&action)) {
      if (acked->cookie == 0) continue;  // the session's own
      Message& message = world_->messages.at(acked->cookie);
      require(message.state == Message::State::sent, "a message was acknowledged twice");
      require(message.lane != 0 || message.delivered ||
                  world_->lost_sessions.contains(message.session) ||
                  world_->dead.contains(message.to),
              "a message was acknowledged before it was complete");
      message.state = Message::State::acked;
      note("acknowledged " + std::to_string(message.number));
    } else if (auto* close = std::get_if<session::CloseConnection>(&action)) {
      note("closes " + std::to_string(close->connection) + ": " + close->error.message);
      greetings_.erase(close->connection);
      world_->network.close(close->connection);
    } else if (auto* lost_session = std::get_if<session::Lost>(&action)) {
      lost(*lost_session);
    } else if (auto* allocate = std::get_if<session::AllocateGrant>(&action)) {
      ++coverage["grants asked"];
      auto [place, memory] = world_->network.allocate_grant(allocate->connection, allocate->bytes);
      if (world_->simulation.random.chance(1, 10)) memory = {};  // none to be had
      session_->grant_ready(world_->simulation.now(), allocate->connection, allocate->seq,
                            allocate->part, place, std::move(memory));
      opened = true;
    } else if (auto* fill = std::get_if<session::FillGrant>(&action)) {
      world_->network.fill_grant(fill->connection, fill->place, fill->bytes);
    } else if (auto* segments = std::get_if<session::PassSegments>(&action)) {
      pass(*segments);
      opened = true;
    } else if (auto* loan = std::get_if<session::MapLoan>(&action)) {
      map(*loan);
      opened = true;
    } else {
      opened = true;  // attached, or the window opened
      if (const auto* attached = std::get_if<session::Attached>(&action)) {
        session_id_ = session_->id();
        note("attached " + std::to_string(attached->connection));
      }
    }
  }
  actions.clear();
  actions_.swap(actions);
  if (opened) pump();
  arm();
}

void Process::arm() {
  const Time next = session_->next_deadline();
  if (next >= timer_ || next == kNever) return;
  timer_ = next;
  const std::uint64_t token = ++timer_token_;
  world_->simulation.at(next, [this, token] {
    if (token == timer_token_) on_tick();
  });
}

void Process::on_tick() {
  if (!alive_) return;
  if (paused_until > world_->simulation.now()) {
    world_->simulation.at(paused_until, [this] { on_tick(); });
    return;
  }
  timer_ = kNever;
  session_->tick(world_->simulation.now());
  act();
}

// The head of a message tells the time that is left when it is written, in every attempt.
void Process::check_written(const session::Write& write) const {
  if (write.frame.header.type != wire::FrameType::message) return;
  const auto head = wire::decode<wire::MessageHead>(write.frame.control.span());
  if (head.attempt > 0) ++coverage["later attempts"];
  if (head.kind == session::kReturnKind) return;
  for (const wire::PartHead& part : head.parts) {
    if (part.id != 0 && part.where != wire::PartWhere::loan) ++coverage["loans sent as bytes"];
  }
  if (head.body.where != wire::PartWhere::inline_) return;
  std::uint64_t number = 0;
  std::memcpy(&number, write.frame.payload.front().data(), sizeof number);
  const Message& message = world_->messages.at(number);
  if (message.deadline == kNever) {
    require(head.ttl_us == 0, "a time limit on a message that has none");
    return;
  }
  const Time latest = std::max(message.deadline, world_->simulation.now()) + microseconds(1);
  require(head.ttl_us > 0 && world_->simulation.now() + microseconds(head.ttl_us) <= latest,
          "a message is given more time than it has left");
}

void Process::deliver(const session::Deliver& delivered) {
  require(delivered.payload.body.size() >= 8, "a message without a body was delivered");
  std::uint64_t number = 0;
  std::memcpy(&number, delivered.payload.body.data(), sizeof number);
  const auto found = world_->messages.find(number);
  require(found != world_->messages.end(), "an unknown message was delivered");
  Message& message = found->second;
  const std::string name = "message " + std::to_string(number);
  require(message.side != side && message.to == instance,
          name + " was delivered to the wrong peer");
  require(!message.delivered, name + " was delivered twice");
  message.delivered = true;
  require(message.lane == delivered.lane && message.kind == delivered.kind,
          name + " has changed its lane or kind");
  require(same_bytes(message.payload.body, delivered.payload.body), name + " has a wrong body");
  if (delivered.lane != 0) {
    std::uint64_t& last = lane_order_[delivered.lane];
    require(last < message.order, name + " was delivered before its turn in the lane");
    last = message.order;
  }
  note("delivered " + std::to_string(number));
  require(!delivered.error || message.not_mapped, name + " had no memory");
  if (delivered.error) return;
  require(message.payload.parts.size() == delivered.payload.parts.size(), name + " misses parts");
  for (std::size_t i = 0; i < message.payload.parts.size(); ++i) {
    // Who was given up, and does not know yet, may map what is the lender's again.
    const bool given_up =
        delivered.payload.find_lent(i) != nullptr &&
        (world_->lost_sessions.contains(message.session) || world_->dead.contains(message.from));
    require(given_up || same_bytes(message.payload.parts[i], delivered.payload.parts[i]),
            name + " has wrong bytes in part " + std::to_string(i));
    require(message.lent.contains(static_cast<std::uint32_t>(i)) ==
                (delivered.payload.find_lent(i) != nullptr),
            name + " does not tell what is lent");
  }
  if (message.payload.body.size() > session::kInlineBytes) memory_.take(delivered.payload.body);
  for (std::size_t i = 0; i < delivered.payload.parts.size(); ++i) {
    const Buffer& part = delivered.payload.parts[i];
    const wire::LentPart* lent = delivered.payload.find_lent(i);
    if (lent != nullptr && !lent->copied) {
      hold(part);
    } else if (part.size() > session::kInlineTotal) {
      memory_.take(part);
    }
  }
}

void Process::lost(const session::Lost& lost) {
  note("lost session: " + lost.reason.message);
  require(lost.reason.code != ErrorCode::wire,
          "honest peers broke the protocol: " + lost.reason.message);
  ++coverage["sessions lost"];
  if (session_id_ != 0) world_->lost_sessions.insert(session_id_);
  for (const session::LostMessage& item : lost.messages) {
    if (item.cookie == 0) continue;
    Message& message = world_->messages.at(item.cookie);
    require(message.state == Message::State::sent, "a message was lost that was not under way");
    message.state = item.written == Ran::no ? Message::State::lost_unwritten : Message::State::lost;
    world_->lost_sessions.insert(message.session);
  }
}

}  // namespace moolink::sim
