// Connections from their opening to their end, and the greeting: HELLO of the dialler, WELCOME of
// the accepting side with its proof, WELCOME of the dialler with its own; the sessions agree in the
// WELCOMEs (session/greeting.cc).

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/mutant.h"
#include "rpc/state.h"

namespace moolink::rpc {

namespace {

// Of REFUSE, as in the protocol: the dialler has reached itself.
constexpr ErrorCode kItself = ErrorCode::invalid_argument;

// What is refused without an answer looks like a lost connection, which is dialled again.
bool is_answered(Objection::Why why) { return why != Objection::Why::name_may_be; }

ErrorCode code_of(Objection::Why why) {
  switch (why) {
    case Objection::Why::version:
      return ErrorCode::wire;
    case Objection::Why::itself:
      return kItself;
    case Objection::Why::not_authorised:
      return ErrorCode::auth;
    case Objection::Why::name_may_be:
      return ErrorCode::timeout;
    case Objection::Why::name_taken:
      break;
  }
  return ErrorCode::error;
}

}  // namespace

Connection* NodeState::find_connection(ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : &found->second;
}

void NodeState::log(LogLevel level, std::string text) {
  actions.push_back(Log{level, std::move(text)});
}

wire::Hello NodeState::hello() {
  greeted_anyone = true;
  wire::Hello hello;
  hello.features = config.features;
  hello.instance = config.instance;
  hello.name = config.name;
  hello.host_key = config.host_key;
  hello.max_frame = config.limits.max_frame;
  hello.addresses = addresses;
  if (hello.addresses.size() > wire::kMaxAddresses) hello.addresses.resize(wire::kMaxAddresses);
  for (std::size_t at = 0; at < hello.nonce.size(); at += 8) {
    const std::uint64_t word = random_.next();
    std::memcpy(hello.nonce.data() + at, &word, 8);
  }
  return hello;
}

void NodeState::opened(Time now, ConnectionId id, wire::PathKind kind,
                       const wire::PathTraits& traits, const std::string& dialled) {
  if (closing_) {
    actions.push_back(CloseConnection{id, make_error(ErrorCode::closed, "this peer is closing")});
    return;
  }
  Connection& connection = connections_[id];
  connection.id = id;
  connection.kind = kind;
  connection.traits = traits;
  connection.dialled = dialled;
  connection.ours = hello();
  timers.push({now + config.greeting_timeout, Timer::Kind::greeting, id, {}});
  if (dialled.empty()) return;
  if (DialTarget* target = dialler_.find(dialled)) dialler_.opened(*target, id);
  actions.push_back(Write{id, wire::make_frame(wire::FrameType::hello, connection.ours)});
}

void NodeState::received(Time now, ConnectionId id, const wire::ReceivedFrame& frame) {
  Connection* connection = find_connection(id);
  if (connection == nullptr) return;  // closed by this side
  if (!connection->proven) {
    try {
      greet(now, *connection, frame);
    } catch (const Exception& broken) {
      log(LogLevel::warning, "a connection is closed: " + broken.error().message);
      drop_connection(now, id, broken.error(), true);
    }
    return;
  }
  Peer& peer = *connection->peer;
  if (frame.header.type == wire::FrameType::refuse) {  // of the proof, which went out last
    refused_late(*connection, frame);
    return;
  }
  if (frame.header.type == wire::FrameType::close) {
    end_peer(peer, Down::closed, "it was closed");
    return;
  }
  peer.session.received(now, id, frame);
  touch(peer);
}

void NodeState::greet(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
  const bool accepted = connection.dialled.empty();
  if (accepted && !connection.theirs && frame.header.type == wire::FrameType::hello) {
    greeted(now, connection, wire::decode_hello(frame.control(), config.limits));
  } else if (frame.header.type == wire::FrameType::welcome &&
             accepted == connection.theirs.has_value()) {
    welcomed(now, connection, frame);
  } else if (frame.header.type == wire::FrameType::refuse) {
    refused(now, connection, wire::decode_control<wire::Refuse>(frame));
  } else {
    wire::fail("the greeting is not one");
  }
}

// What speaks against a connection with a peer that greets so.
std::optional<Objection> NodeState::objection(Time now, const wire::Hello& theirs) const {
  using Why = Objection::Why;
  if (theirs.wire_min > wire::kVersion || theirs.wire_max < wire::kVersion) {
    return Objection{Why::version, "peer '" + config.name + "' speaks version " +
                                       std::to_string(wire::kVersion) + " of the protocol only"};
  }
  if (theirs.instance == config.instance) return Objection{Why::itself, "this is the peer itself"};
  bool taken = theirs.name == config.name;
  bool doubtful = false;
  if (const auto holder = names_.find(theirs.name);
      holder != names_.end() && holder->second != theirs.instance) {
    const auto peer = peers_.find(holder->second);
    if (peer != peers_.end() && peer->second->up) {
      const session::Session& session = peer->second->session;
      const bool answers = session.connected() && !session.suspected(now);
      taken = taken || answers;
      // Its connection may be gone for a moment only.
      doubtful = !answers && now - session.last_heard() < config.timing.suspect_after;
    }
  }
  if (!taken && doubtful && !mutant("give_name_away_at_once")) {
    return Objection{Why::name_may_be, "the name '" + theirs.name +
                                           "' is that of a peer that was heard a moment ago"};
  }
  if (taken && !mutant("accept_duplicate_name")) {
    return Objection{Why::name_taken, "the name '" + theirs.name +
                                          "' is taken by a peer that answers: give this one "
                                          "another name"};
  }
  return std::nullopt;
}

// HELLO at the accepting side.
void NodeState::greeted(Time now, Connection& connection, wire::Hello theirs) {
  if (const auto wrong = objection(now, theirs)) return refuse(now, connection, *wrong);
  connection.ours.proof = policy_->proof(theirs, connection.ours, false);
  Peer& peer = ensure_peer(theirs.instance);
  connection.theirs = std::move(theirs);
  connection.peer = &peer;
  peer.session.attach(now, connection.id, connection.kind, connection.traits, false,
                      connection.ours);
  touch(peer);
}

// The first WELCOME, with the other side's proof.
void NodeState::welcomed(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
  wire::Hello theirs = wire::decode_hello(frame.control(), config.limits);
  const bool by_dialler = connection.dialled.empty();
  if (by_dialler && theirs.instance != connection.theirs->instance) {
    wire::fail("two instances on one connection");
  }
  const wire::Hello& dialler = by_dialler ? *connection.theirs : connection.ours;
  const wire::Hello& acceptor = by_dialler ? connection.ours : theirs;
  std::string reason;
  if (!policy_->accepts(dialler, acceptor, by_dialler, theirs.proof, reason)) {
    return refuse(now, connection,
                  {Objection::Why::not_authorised, "peer '" + theirs.name +
                                                       "' has not proven that it may connect to '" +
                                                       config.name + "': " + reason});
  }
  if (const auto wrong = objection(now, theirs)) return refuse(now, connection, *wrong);
  adopt(connection, theirs);
  Peer& peer = *connection.peer;
  connection.proven = true;
  if (!by_dialler) {
    connection.ours.proof = policy_->proof(connection.ours, theirs, true);
    connection.theirs = std::move(theirs);
    peer.session.attach(now, connection.id, connection.kind, connection.traits, true,
                        connection.ours);
  }
  peer.session.received(now, connection.id, frame);
  touch(peer);
}

// The other side is who it says: its name is its own, whoever bore it before is gone.
void NodeState::adopt(Connection& connection, const wire::Hello& theirs) {
  if (const auto holder = names_.find(theirs.name);
      holder != names_.end() && holder->second != theirs.instance) {
    if (Peer* former = find_peer(holder->second)) {
      end_peer(*former, Down::dead, "another instance has taken its name");
    }
  }
  Peer& peer = ensure_peer(theirs.instance);
  if (!peer.name.empty() && peer.name != theirs.name) {
    wire::fail("peer '" + peer.name + "' calls itself '" + theirs.name + "' now");
  }
  peer.name = theirs.name;
  peer.host_key = theirs.host_key;
  peer.addresses = theirs.addresses;
  names_[peer.name] = peer.instance;
  connection.peer = &peer;
}

void NodeState::refuse(Time now, Connection& connection, const Objection& objection) {
  const ErrorCode code = code_of(objection.why);
  if (is_answered(objection.why)) {
    actions.push_back(Write{connection.id, wire::make_frame(wire::FrameType::refuse,
                                                            wire::Refuse{code, objection.text})});
    if (objection.why != Objection::Why::itself) {
      log(LogLevel::warning, "a connection is refused: " + objection.text);
    }
  }
  drop_connection(now, connection.id, make_error(code, objection.text), true);
}

void NodeState::refused(Time now, Connection& connection, const wire::Refuse& refusal) {
  const std::string address = connection.dialled;
  if (refusal.code == kItself) {
    drop_connection(now, connection.id, make_error(ErrorCode::closed, refusal.text), true);
    dialler_.remove(address);
    return;
  }
  const std::string where = address.empty() ? "the peer that connected" : address;
  log(LogLevel::warning, where + " refuses this peer: " + refusal.text);
  Error error = make_error(refusal.code == ErrorCode::none ? ErrorCode::error : refusal.code,
                           where + " refuses this peer: " + refusal.text);
  drop_connection(now, connection.id, error, true);
  // Calls that have no other way to their peer need not wait for their time to be up.
  const bool connected =
      std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->up; });
  std::vector<CallId> hopeless;
  for (const auto& [name, search] : searches_) {
    const DialTarget* target = dialler_.find(address);
    const bool meant = target != nullptr && target->peer == name;
    if (connected && !meant) continue;
    hopeless.insert(hopeless.end(), search.calls.begin(), search.calls.end());
  }
  for (const CallId id : hopeless) {
    const auto found = calls_.find(id);
    if (found == calls_.end()) continue;
    error.peer = found->second.peer;
    error.function = found->second.function;
    complete(id, error);
  }
}

// The dialler's proof is the last word of the greeting: its refusal comes when this side already
// takes the connection for good.
void NodeState::refused_late(Connection& connection, const wire::ReceivedFrame& frame) {
  Peer& peer = *connection.peer;
  std::string text = connection.dialled + " refuses this peer";
  ErrorCode code = ErrorCode::auth;
  try {
    const auto refusal = wire::decode_control<wire::Refuse>(frame);
    code = refusal.code == ErrorCode::none ? ErrorCode::error : refusal.code;
    text += ": " + refusal.text;
  } catch (const Exception& broken) {
    text += ", and does not say why: " + broken.error().message;
  }
  log(LogLevel::warning, text);
  peer.session.end(make_error(code, text), false);
  touch(peer);
}

void NodeState::closed(Time now, ConnectionId id, const Error& error) {
  drop_connection(now, id, error, false);
}

// Takes a connection off the books, and out of its session if that has not dropped it itself.
void NodeState::drop_connection(Time now, ConnectionId id, const Error& error,
                                bool tell_transport) {
  Connection* connection = find_connection(id);
  if (connection == nullptr) return;
  if (DialTarget* target = dialler_.of_connection(id)) {
    if (!connection->attached) note_failure(*target, error.message);
    dialler_.failed(*target, now, connection->attached ? "" : error.message);
    arm(*target);
  }
  Peer* peer = connection->peer;
  connections_.erase(id);
  if (tell_transport) actions.push_back(CloseConnection{id, error});
  if (peer != nullptr && peer->session.has(id)) {
    peer->session.disconnected(now, id);
    touch(*peer);
  }
  if (peer != nullptr && peer->up && !peer->session.connected()) disconnected_from(now, *peer);
}

void NodeState::disconnected_from(Time now, Peer& peer) {
  if (mutant("no_redial")) return;
  for (auto& [address, target] : dialler_.targets()) {
    if (target.instance != peer.instance || target.state != DialTarget::State::idle) continue;
    target.next_try = std::min(target.next_try, now + config.redial_first);
    arm(target);
  }
  dial_peer(now, peer);
}

void NodeState::greeting_timed_out(Time now, ConnectionId id) {
  Connection& connection = connections_.at(id);
  const std::string where = connection.dialled.empty() ? "a connection" : connection.dialled;
  drop_connection(now, id, make_error(ErrorCode::timeout, where + " did not answer the greeting"),
                  true);
}

}  // namespace moolink::rpc
