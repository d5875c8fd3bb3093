#include "rpc/connections.h"

#include <algorithm>
#include <utility>

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
constexpr Duration kWarningInterval = seconds(30);

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

wire::Hello Connections::hello() {
  wire::Hello hello;
  hello.features = wire::kFeatures;
  hello.instance = shared_.config.instance;
  hello.name = shared_.config.name;
  hello.host_key = shared_.config.host_key;
  hello.max_frame = shared_.config.limits.max_frame;
  hello.addresses = shared_.addresses;
  if (hello.addresses.size() > wire::kMaxAddresses) hello.addresses.resize(wire::kMaxAddresses);
  wire::lie_about_version(hello);
  shared_.authenticator.introduce(hello, ++greetings_);
  return hello;
}

void Connections::opened(Time now, ConnectionId id, wire::PathKind kind,
                         const wire::PathTraits& traits, const std::string& dialled) {
  guard([&] { open(now, id, kind, traits, dialled); },
        [&](const Error& error) { drop_after_opening(now, id, dialled, error); });
}

void Connections::open(Time now, ConnectionId id, wire::PathKind kind,
                       const wire::PathTraits& traits, const std::string& dialled) {
  if (shared_.closing) {
    shared_.post(CloseConnection{id, make_error(ErrorCode::closed, "this peer is closing")});
    return;
  }
  Connection& connection = table_.add(id);
  connection.id = id;
  connection.kind = kind;
  connection.traits = traits;
  connection.dialled = dialled;
  connection.ours = hello();
  shared_.timers.push({now + shared_.config.greeting_timeout, Timer::Kind::greeting, id, {}});
  if (dialled.empty()) return;
  if (DialTarget* target = dialler_.find(dialled)) Dialler::opened(*target, id);
  shared_.post(Write{id, wire::make_frame(wire::FrameType::hello, connection.ours)});
}

// The opening failed for lack of memory.
void Connections::drop_after_opening(Time now, ConnectionId id, const std::string& dialled,
                                     const Error& error) {
  if (DialTarget* target = dialler_.find(dialled)) Dialler::opened(*target, id);
  if (table_.find(id) != nullptr) return drop(now, id, error, true);
  shared_.post(CloseConnection{id, error});
  if (DialTarget* target = dialler_.of_connection(id)) redial(now, *target, error, false);
}

// It is dialled again even if memory is lacking.
void Connections::dial_failed(Time now, const std::string& address, const Error& error) {
  guard([&] { dial_ended(now, address, error); },
        [&](const Error& lacking) { dial_ended(now, address, lacking); });
}

void Connections::dial_ended(Time now, const std::string& address, const Error& error) {
  DialTarget* target = dialler_.find(address);
  if (target == nullptr || target->state != DialTarget::State::dialling) return;
  if (error.code == ErrorCode::auth) {
    Error told = error;
    told.message += "; " + shared_.authenticator.advice();
    warn_once(now, told.message);
    fail_callers(now, address, {}, told);
  } else if (target->failures == 0 && target->wanted_by_user) {
    shared_.log(LogLevel::warning, error.message + "; trying again");
  }
  redial(now, *target, error, false);
  if (error.code != ErrorCode::peer_lost) return;
  // No peer listens there. The peer last met there, if not connected, has ended; so has a peer of
  // this host that announced the address.
  Peer* peer = dialler_.peer_at(*target);
  if (peer == nullptr || !peer->up || peer->session.connected()) return;
  if (peer->instance == target->instance || peer->host_key == shared_.config.host_key) {
    peers_.end(*peer, Down::dead, "no process listens at " + address + " any more");
  }
}

// ---- the greeting ----

// The acceptor's refusal of the dialler's proof arrives when the dialler already trusts it.
bool Connections::greets(const Connection& connection, wire::FrameType type) {
  return !connection.proven || (type == wire::FrameType::refuse && !connection.attached);
}

void Connections::greeted(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
  guard([&] { greet(now, connection, frame); },
        [&, id = connection.id](const Error& broken) {
          drop(now, id, broken, true);
          log_limited(now, "a connection is closed: " + broken.message);
        });
}

void Connections::greeting_due(Time now, ConnectionId id) {
  const std::string& dialled = table_.find(id)->dialled;
  const std::string where = dialled.empty() ? "a connection" : dialled;
  drop(now, id, make_error(ErrorCode::timeout, where + " did not answer the greeting"), true);
}

// The only frames read from a side that has not proven itself.
void Connections::greet(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
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
void Connections::note_own_dial(const wire::Hello& hello) {
  for (auto& [id, connection] : table_.all()) {
    if (!connection.dialled.empty() && connection.ours.nonce == hello.nonce) {
      connection.to_itself = true;
    }
  }
}

// The objection after its proof: unauthenticated peers and other groups learn no taken names.
Error Connections::objection_to_name(Time now, const Connection& connection) const {
  const wire::Hello& theirs = *connection.theirs;
  bool taken = theirs.name == shared_.config.name;
  bool doubtful = false;
  const Peer* holder = peers_.find(theirs.name, connection.scope);
  if (holder != nullptr && holder->instance != theirs.instance && holder->up) {
    const session::Session& session = holder->session;
    const bool answers = session.connected() && !session.suspected(now);
    taken = taken || answers;
    // Its connection may be lost for a moment only.
    doubtful = !answers && now - session.last_heard() < shared_.config.timing.suspect_after;
  }
  if (!taken && doubtful) {
    return make_error(kNameMayBeTaken, "the name '" + theirs.name +
                                           "' is that of a peer that was heard a moment ago");
  }
  if (taken) {
    return make_error(ErrorCode::error,
                      "the name '" + theirs.name +
                          "' is taken by a peer that answers: give this one another name");
  }
  return {};
}

// HELLO at the acceptor, which proves itself first.
void Connections::answer(Time now, Connection& connection) {
  const Verdict verdict =
      shared_.authenticator.answer(connection.channel(), *connection.theirs, connection.ours);
  if (!verdict.refusal.empty()) {
    return refuse(now, connection, make_error(ErrorCode::auth, verdict.refusal));
  }
  shared_.post(Write{connection.id, wire::make_frame(wire::FrameType::hello, connection.ours)});
}

// HELLO at the dialler: sends its own proof together with its session.
void Connections::answered(Time now, Connection& connection) {
  wire::Hello welcome = connection.ours;
  const Verdict verdict = shared_.authenticator.check_acceptor(
      connection.channel(), connection.ours, *connection.theirs, welcome);
  if (!verdict.refusal.empty()) {
    return refuse(now, connection, make_error(ErrorCode::auth, verdict.refusal));
  }
  connection.ours = std::move(welcome);
  connection.scope = verdict.scope;
  enter(now, connection);
}

// The first WELCOME at the acceptor, with the dialler's proof.
void Connections::welcomed(Time now, Connection& connection, const wire::ReceivedFrame& frame) {
  const wire::Hello welcome = wire::decode_hello(frame.control());
  if (welcome.instance != connection.theirs->instance || welcome.name != connection.theirs->name) {
    wire::fail("two peers on one connection");
  }
  const Verdict verdict = shared_.authenticator.check_dialler(
      connection.channel(), *connection.theirs, connection.ours, welcome);
  if (!verdict.refusal.empty()) {
    return refuse(now, connection, make_error(ErrorCode::auth, verdict.refusal));
  }
  connection.scope = verdict.scope;
  connection.ours.proof.clear();
  if (!enter(now, connection)) return;
  connection.peer->session.received(now, connection.id, frame);
  peers_.touch(*connection.peer);
}

// The other side has proven itself: only now may it affect this peer's state.
bool Connections::enter(Time now, Connection& connection) {
  if (const Error wrong = objection_to_name(now, connection)) {
    refuse(now, connection, wrong);
    return false;
  }
  adopt(connection, *connection.theirs);
  connection.proven = true;
  connection.peer->session.attach(now, connection.id, connection.kind, connection.traits,
                                  !connection.dialled.empty(), connection.ours);
  peers_.touch(*connection.peer);
  return true;
}

// The other side's identity is proven: the name is its own, and a former owner is gone.
void Connections::adopt(Connection& connection, const wire::Hello& theirs) {
  if (Peer* former = peers_.find(theirs.name, connection.scope);
      former != nullptr && former->instance != theirs.instance) {
    peers_.end(*former, Down::dead, "another instance has taken its name");
  }
  Peer& peer = peers_.ensure(theirs.instance);
  if (!peer.name.empty() && (peer.name != theirs.name || peer.scope != connection.scope)) {
    wire::fail("peer '" + peer.name + "' calls itself '" + theirs.name +
               "' now, or shows the key of another group");
  }
  peers_.set_name(peer, theirs.name, connection.scope);
  peer.host_key = theirs.host_key;
  peer.addresses = theirs.addresses;
  connection.peer = &peer;
}

void Connections::refuse(Time now, Connection& connection, Error error) {
  const std::string where = connection.dialled.empty() ? "a connection" : connection.dialled;
  if (error.code != kNameMayBeTaken) {
    shared_.post(Write{connection.id, wire::make_frame(wire::FrameType::refuse,
                                                       wire::Refuse{error.code, error.message,
                                                                    shared_.config.name})});
  }
  if (error.code == ErrorCode::auth) {
    error.message = where + " is refused: " + error.message + "; " + shared_.authenticator.advice();
    warn_once(now, error.message);
  } else if (error.code != kNameMayBeTaken && error.code != kItself) {
    warn_once(now, "a connection is refused: " + error.message);
  }
  drop_refused(now, connection, connection.theirs->name, error, error.code == ErrorCode::auth);
}

void Connections::refused(Time now, Connection& connection, const wire::Refuse& refusal) {
  const std::string address = connection.dialled;
  if (connection.to_itself) {
    drop(now, connection.id, make_error(ErrorCode::closed, refusal.text), true);
    dialler_.remove(address);
    return;
  }
  const bool greeted = connection.theirs && (connection.proven || refusal.name.empty());
  const std::string name = greeted ? connection.theirs->name : refusal.name;
  const std::string where = address.empty() ? "the peer that connected" : address;
  std::string text = where + " refuses this peer: " + refusal.text;
  if (refusal.code == ErrorCode::auth) text += "; " + shared_.authenticator.advice();
  warn_once(now, text);
  drop_refused(now, connection, name,
               make_error(refusal.code == ErrorCode::none ? ErrorCode::error : refusal.code, text),
               true);
}

// Calls of that name end at once if the refusal is `final`, and the name certain: it is proven, or
// a process of the same user refuses, through shared memory. Over tcp any host may refuse under any
// name. One that answers a dial ends only calls that have no other way to their peer.
void Connections::drop_refused(Time now, const Connection& connection, std::string name,
                               const Error& error, bool final) {
  const std::string address = connection.dialled;
  const bool of_this_user = connection.kind == wire::PathKind::shm;
  const bool certain = !address.empty() || of_this_user;
  const bool has_name = of_this_user || connection.proven;
  if (!has_name) name.clear();
  drop(now, connection.id, error, true);
  if (final && certain) fail_callers(now, address, name, error);
}

void Connections::turned_away(Time now, const Error& error) {
  if (error.code == ErrorCode::auth)
    warn_once(now, error.message + "; " + shared_.authenticator.advice());
}

void Connections::warn_once(Time now, const std::string& text) {
  if (text == last_warning_ && now - warned_at_ < kWarningInterval) return;
  last_warning_ = text;
  warned_at_ = now;
  log_limited(now, text);
}

// About an unauthenticated connection.
void Connections::log_limited(Time now, std::string text) {
  auto line = log_limit_.line(now, std::move(text));
  if (line) shared_.log(LogLevel::warning, std::move(*line));
}

// Calls with no other way to their peer need not wait until their time-out. `name`: empty, unless
// the peer at the address has it for certain.
void Connections::fail_callers(Time now, const std::string& address, const std::string& name,
                               const Error& error) {
  DialTarget* target = dialler_.find(address);
  const Duration refused_for = target == nullptr ? Duration(0) : Dialler::refused(*target, now);
  const bool only_way = !peers_.any_is_up() && dialler_.refused_everywhere(address);
  const bool name_is_taken = error.code == ErrorCode::error &&
                             refused_for >= shared_.config.timing.suspect_after + kHolderLives;
  if (!address.empty() && (error.code == ErrorCode::auth || name_is_taken)) {
    shared_.post(Refused{name, only_way, error});
  }
  directory_.fail_calls(name, only_way, error);
}

void Connections::drop(Time now, ConnectionId id, const Error& error, bool tell_transport) {
  Connection* connection = table_.find(id);
  if (connection == nullptr) return;
  Peer* peer = connection->peer;
  if (tell_transport) {
    shared_.post(CloseConnection{id, error, peer == nullptr ? Uid{} : peer->instance});
  }
  const bool attached = connection->attached;
  table_.erase(id);
  if (!attached) shared_.timers.forget();
  if (DialTarget* target = dialler_.of_connection(id)) redial(now, *target, error, attached);
  if (peer == nullptr) return;
  peers_.guarded(*peer, [&] {
    if (peer->session.has(id)) {
      peers_.touch(*peer);
      peer->session.disconnected(now, id);
    }
    // A refused address is dialled again after longer and longer pauses.
    if (attached && peer->up && !peer->session.connected()) dialler_.redial_peer(now, *peer);
  });
}

}  // namespace moolink::rpc
