// Connections from their opening to their end, and the greeting: HELLO of the dialler, HELLO of the
// acceptor with its proof, WELCOME of the dialler with its own; the sessions agree in this and
// further WELCOMEs (session/agreement.cc). docs/design/protocol/rpc.md holds the table.

#include <algorithm>
#include <utility>

#include "base/mutant.h"
#include "rpc/node.h"
#include "wire/hostile_messages.h"

namespace moolink::rpc {

namespace {

// The codes of refusals are wire (another version), auth (no proof that it may connect), error (its
// name is taken by a peer that answers) and these two.
constexpr ErrorCode kItself = ErrorCode::invalid_argument;  // the dialler has reached itself
// The name is that of a peer heard a moment ago. No REFUSE is sent: the other side takes this for a
// lost connection, and dials again.
constexpr ErrorCode kNameMayBeTaken = ErrorCode::timeout;
// The name of a peer that has died is refused to its successor for suspect_after at most. If it is
// refused for this much longer, its holder lives.
constexpr Duration kHolderLives = milliseconds(400);
// The same warning is not logged again for this long.
constexpr Duration kSayAgain = seconds(30);

std::string says_versions(const wire::Hello& hello) {
  std::string text = "peer '" + hello.name + "' speaks version ";
  text += std::to_string(hello.wire_min);
  if (hello.wire_max != hello.wire_min) text += " to " + std::to_string(hello.wire_max);
  return text + " of the protocol";
}

// The objection to a peer of this greeting, before it has proven anything.
Error objection(const wire::Hello& ours, const wire::Hello& theirs) {
  if (!wire::common_version(ours, theirs)) {
    const bool older = theirs.wire_max < ours.wire_min;
    return make_error(ErrorCode::wire, says_versions(theirs) + ", and " + says_versions(ours) +
                                           ": update moolink where peer '" +
                                           (older ? theirs.name : ours.name) + "' runs");
  }
  if (theirs.instance == ours.instance) return make_error(kItself, "this is the peer itself");
  return {};
}

}  // namespace

Connection* Node::find_connection(ConnectionId id) {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : &found->second;
}

wire::Hello Node::hello() {
  greeted_anyone_ = true;
  wire::Hello hello;
  hello.features = wire::kFeatures;
  hello.instance = config_.instance;
  hello.name = config_.name;
  hello.host_key = config_.host_key;
  hello.max_frame = config_.limits.max_frame;
  hello.addresses = addresses_;
  if (hello.addresses.size() > wire::kMaxAddresses) hello.addresses.resize(wire::kMaxAddresses);
  wire::lie_about_version(hello);
  authenticator_->introduce(hello, ++greetings_);
  return hello;
}

void Node::opened(Time now, ConnectionId id, wire::PathKind kind, const wire::PathTraits& traits,
                  const std::string& dialled) {
  guard([&] { open(now, id, kind, traits, dialled); },
        [&](const Error& error) { drop_after_opening(now, id, dialled, error); });
  settle(now);
}

void Node::open(Time now, ConnectionId id, wire::PathKind kind, const wire::PathTraits& traits,
                const std::string& dialled) {
  if (closing_) {
    actions_.push_back(CloseConnection{id, make_error(ErrorCode::closed, "this peer is closing")});
    return;
  }
  Connection& connection = connections_[id];
  connection.id = id;
  connection.kind = kind;
  connection.traits = traits;
  connection.dialled = dialled;
  connection.ours = hello();
  timers_.push({now + config_.greeting_timeout, Timer::Kind::greeting, id, {}});
  if (dialled.empty()) return;
  if (DialTarget* target = dialler_.find(dialled)) dialler_.opened(*target, id);
  actions_.push_back(Write{id, wire::make_frame(wire::FrameType::hello, connection.ours)});
}

// The opening failed for lack of memory.
void Node::drop_after_opening(Time now, ConnectionId id, const std::string& dialled,
                              const Error& error) {
  if (DialTarget* target = dialler_.find(dialled)) dialler_.opened(*target, id);
  if (find_connection(id) != nullptr) return drop_connection(now, id, error, true);
  actions_.push_back(CloseConnection{id, error});
  if (DialTarget* target = dialler_.of_connection(id)) redial(now, *target, error, false);
}

void Node::received(Time now, ConnectionId id, const wire::ReceivedFrame& frame) {
  Connection* connection = find_connection(id);
  if (connection == nullptr) return;  // closed by this side
  // The acceptor's refusal of the dialler's proof arrives when the dialler already trusts it.
  const bool refusal = frame.header.type == wire::FrameType::refuse && !connection->attached;
  if (!connection->proven || refusal) {
    guard([&] { greet(now, *connection, frame); },
          [&](const Error& broken) {
            drop_connection(now, id, broken, true);
            log_limited(now, "a connection is closed: " + broken.message);
          });
    return settle(now);
  }
  Peer& peer = *connection->peer;
  guarded(peer, [&] {
    touch(peer);
    if (frame.header.type != wire::FrameType::close) return peer.session.received(now, id, frame);
    const auto close = wire::decode_control<wire::Close>(frame);
    if (close.code == ErrorCode::closed) return end_peer(peer, Down::closed, "it was closed");
    end_peer(peer, Down::unreachable, "it ended the session: " + close.text);
  });
  settle(now);
}

// The only frames read from a side that has not proven itself.
void Node::greet(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
  const bool accepted = connection.dialled.empty();
  if (frame.header.type == wire::FrameType::hello && !connection.theirs) {
    connection.theirs = wire::decode_hello(frame.control());
    if (const Error wrong = objection(connection.ours, *connection.theirs)) {
      if (wrong.code == kItself) note_own_dial(*connection.theirs);
      refuse(now, connection, wrong);
    } else if (accepted) {
      answer(now, connection);
    } else {
      answered(now, connection);
    }
  } else if (frame.header.type == wire::FrameType::welcome && accepted && connection.theirs) {
    welcomed(now, connection, frame);
  } else if (frame.header.type == wire::FrameType::refuse) {
    refused(now, connection, wire::decode_control<wire::Refuse>(frame));
  } else {
    wire::fail("the greeting is not one");
  }
}

// Its REFUSE will come by the other end: any host could say so in its place.
void Node::note_own_dial(const wire::Hello& hello) {
  for (auto& [id, connection] : connections_) {
    if (!connection.dialled.empty() && connection.ours.nonce == hello.nonce) {
      connection.to_itself = true;
    }
  }
}

// The objection after its proof: unauthenticated peers and other groups learn no taken names.
Error Node::objection_to_name(Time now, const Connection& connection) const {
  const wire::Hello& theirs = *connection.theirs;
  bool taken = theirs.name == config_.name;
  bool doubtful = false;
  const Peer* holder = find_peer(theirs.name, connection.scope);
  if (holder != nullptr && holder->instance != theirs.instance && holder->up) {
    const session::Session& session = holder->session;
    const bool answers = session.connected() && !session.suspected(now);
    taken = taken || answers;
    // Its connection may be lost for a moment only.
    doubtful = !answers && now - session.last_heard() < config_.timing.suspect_after;
  }
  if (!taken && doubtful && !mutant("give_name_away_at_once")) {
    return make_error(kNameMayBeTaken, "the name '" + theirs.name +
                                           "' is that of a peer that was heard a moment ago");
  }
  if (taken && !mutant("accept_duplicate_name")) {
    return make_error(ErrorCode::error,
                      "the name '" + theirs.name +
                          "' is taken by a peer that answers: give this one another name");
  }
  return {};
}

// HELLO at the acceptor, which proves itself first.
void Node::answer(Time now, Connection& connection) {
  const Verdict verdict =
      authenticator_->answer(connection.channel(), *connection.theirs, connection.ours);
  if (!verdict.refusal.empty()) {
    return refuse(now, connection, make_error(ErrorCode::auth, verdict.refusal));
  }
  actions_.push_back(
      Write{connection.id, wire::make_frame(wire::FrameType::hello, connection.ours)});
}

// HELLO at the dialler: sends its own proof together with its session.
void Node::answered(Time now, Connection& connection) {
  wire::Hello welcome = connection.ours;
  const Verdict verdict = authenticator_->check_acceptor(connection.channel(), connection.ours,
                                                         *connection.theirs, welcome);
  if (!verdict.refusal.empty()) {
    return refuse(now, connection, make_error(ErrorCode::auth, verdict.refusal));
  }
  connection.ours = std::move(welcome);
  connection.scope = verdict.scope;
  enter(now, connection);
}

// The first WELCOME at the acceptor, with the dialler's proof.
void Node::welcomed(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
  const auto attach = [&] {
    if (!enter(now, connection)) return;
    connection.peer->session.received(now, connection.id, frame);
    touch(*connection.peer);
  };
  if (const ConnectionId id = connection.id; mutant("attach_before_proof")) {
    attach();
    if (find_connection(id) == nullptr) return;
  }
  const wire::Hello welcome = wire::decode_hello(frame.control());
  if (welcome.instance != connection.theirs->instance || welcome.name != connection.theirs->name) {
    wire::fail("two peers on one connection");
  }
  const Verdict verdict = authenticator_->check_dialler(connection.channel(), *connection.theirs,
                                                        connection.ours, welcome);
  if (!verdict.refusal.empty()) {
    return refuse(now, connection, make_error(ErrorCode::auth, verdict.refusal));
  }
  connection.scope = verdict.scope;
  connection.ours.proof.clear();
  if (!mutant("attach_before_proof")) attach();
}

// The other side has proven itself: only now may it affect this peer's state.
bool Node::enter(Time now, Connection& connection) {
  if (mutant("ignore_scopes")) connection.scope.clear();
  if (const Error wrong = objection_to_name(now, connection)) {
    refuse(now, connection, wrong);
    return false;
  }
  adopt(connection, *connection.theirs);
  connection.proven = true;
  connection.peer->session.attach(now, connection.id, connection.kind, connection.traits,
                                  !connection.dialled.empty(), connection.ours);
  touch(*connection.peer);
  return true;
}

// The other side's identity is proven: the name is its own, and a former owner is gone.
void Node::adopt(Connection& connection, const wire::Hello& theirs) {
  if (Peer* former = find_peer(theirs.name, connection.scope);
      former != nullptr && former->instance != theirs.instance) {
    end_peer(*former, Down::dead, "another instance has taken its name");
  }
  Peer& peer = ensure_peer(theirs.instance);
  if (!peer.name.empty() && (peer.name != theirs.name || peer.scope != connection.scope)) {
    wire::fail("peer '" + peer.name + "' calls itself '" + theirs.name +
               "' now, or shows the key of another group");
  }
  peer.name = theirs.name;
  peer.scope = connection.scope;
  peer.host_key = theirs.host_key;
  peer.addresses = theirs.addresses;
  names_[{peer.name, peer.scope}] = peer.instance;
  connection.peer = &peer;
}

void Node::refuse(Time now, Connection& connection, Error error) {
  const std::string where = connection.dialled.empty() ? "a connection" : connection.dialled;
  if (error.code != kNameMayBeTaken) {
    actions_.push_back(Write{
        connection.id, wire::make_frame(wire::FrameType::refuse,
                                        wire::Refuse{error.code, error.message, config_.name})});
  }
  if (error.code == ErrorCode::auth) {
    error.message = where + " is refused: " + error.message + "; " + authenticator_->advice();
    warn_once(now, error.message);
  } else if (error.code != kNameMayBeTaken && error.code != kItself) {
    warn_once(now, "a connection is refused: " + error.message);
  }
  drop_refused(now, connection, connection.theirs->name, error, error.code == ErrorCode::auth);
}

void Node::refused(Time now, Connection& connection, const wire::Refuse& refusal) {
  const std::string address = connection.dialled;
  if (connection.to_itself) {
    drop_connection(now, connection.id, make_error(ErrorCode::closed, refusal.text), true);
    dialler_.remove(address);
    return;
  }
  const bool greeted = connection.theirs && (connection.proven || refusal.name.empty());
  const std::string name = greeted ? connection.theirs->name : refusal.name;
  const std::string where = address.empty() ? "the peer that connected" : address;
  std::string text = where + " refuses this peer: " + refusal.text;
  if (refusal.code == ErrorCode::auth) text += "; " + authenticator_->advice();
  warn_once(now, text);
  drop_refused(now, connection, name,
               make_error(refusal.code == ErrorCode::none ? ErrorCode::error : refusal.code, text),
               true);
}

// Calls of that name end at once if the refusal is `final`, and the name certain: it is proven, or
// a process of the same user refuses, through shared memory. Over tcp any host may refuse under any
// name. One that answers a dial ends only calls that have no other way to their peer.
void Node::drop_refused(Time now, Connection& connection, std::string name, const Error& error,
                        bool final) {
  const std::string address = connection.dialled;
  const bool of_this_user = connection.kind == wire::PathKind::shm;
  const bool certain = !address.empty() || of_this_user;
  const bool has_name = of_this_user || connection.proven || mutant("believe_names_of_refusals");
  if (!has_name) name.clear();
  drop_connection(now, connection.id, error, true);
  if (final && certain) fail_callers(now, address, name, error);
}

// Its handshake failed, or its first bytes showed that it cannot succeed.
void Node::turned_away(Time now, const Error& error) {
  if (error.code == ErrorCode::auth)
    warn_once(now, error.message + "; " + authenticator_->advice());
}

// A peer that dials again and again is refused each time.
void Node::warn_once(Time now, const std::string& text) {
  if (text == last_warning_ && now - warned_at_ < kSayAgain) return;
  last_warning_ = text;
  warned_at_ = now;
  log_limited(now, text);
}

// Calls with no other way to their peer need not wait until their time-out. `name`: empty, unless
// the peer at the address has it for certain.
void Node::fail_callers(Time now, const std::string& address, const std::string& name,
                        Error error) {
  DialTarget* target = dialler_.find(address);
  const Duration refused_for = target == nullptr ? Duration(0) : Dialler::refused(*target, now);
  const bool only_way = !any_peer_is_up() && dialler_.refused_everywhere(address);
  std::vector<CallId> hopeless;
  for (const auto& [searched, search] : searches_) {
    if (searched.name != name && !only_way) continue;
    hopeless.insert(hopeless.end(), search.calls.begin(), search.calls.end());
  }
  const bool name_is_taken = error.code == ErrorCode::error &&
                             (refused_for >= config_.timing.suspect_after + kHolderLives ||
                              mutant("first_refusal_is_final"));
  if (!address.empty() && (error.code == ErrorCode::auth || name_is_taken)) {
    actions_.push_back(Refused{name, only_way, error});
  }
  for (const CallId id : hopeless) {
    const auto found = calls_.find(id);
    if (found == calls_.end()) continue;
    error.peer = found->second.receiver.text();
    error.function = found->second.function;
    complete(id, error);
  }
}

void Node::closed(Time now, ConnectionId id, const Error& error) {
  drop_connection(now, id, error, false);
  turned_away(now, error);
  settle(now);
}

// Removes a connection, also from its session if that has not dropped it itself.
void Node::drop_connection(Time now, ConnectionId id, const Error& error, bool tell_transport) {
  Connection* connection = find_connection(id);
  if (connection == nullptr) return;
  Peer* peer = connection->peer;
  if (tell_transport) {
    actions_.push_back(CloseConnection{id, error, peer == nullptr ? Uid{} : peer->instance});
  }
  const bool attached = connection->attached;
  connections_.erase(id);
  if (!attached) forget_timer();
  if (DialTarget* target = dialler_.of_connection(id)) redial(now, *target, error, attached);
  if (peer == nullptr) return;
  guarded(*peer, [&] {
    if (peer->session.has(id)) {
      touch(*peer);
      peer->session.disconnected(now, id);
    }
    // A refused address is dialled again after longer and longer pauses.
    if (attached && peer->up && !peer->session.connected()) disconnected_from(now, *peer);
  });
}

// Its connection has ended. Dialling again matters more than the report of it.
void Node::redial(Time now, DialTarget& target, const Error& error, bool attached) {
  const auto tell = [&] {
    if (attached) return;
    note_failure(target, error.message);
    target.last_error = error.message;
    // After the refusal of a name, drop_refused() sets it.
    target.error_is_refusal = error.code == ErrorCode::auth;
    tell_of_lost_path(target);
  };
  dialler_.failed(target, now);
  guard(tell, [](const Error&) {});
  guard([&] { arm(target); }, [&](const Error&) { arm(target); });
}

void Node::disconnected_from(Time now, Peer& peer) {
  if (mutant("no_redial")) return;
  for (auto& [address, target] : dialler_.targets()) {
    if (target.instance != peer.instance || target.state != DialTarget::State::idle) continue;
    target.next_try = std::min(target.next_try, now + config_.redial_first);
    arm(target);
  }
  dial_peer(now, peer);
}

}  // namespace moolink::rpc
