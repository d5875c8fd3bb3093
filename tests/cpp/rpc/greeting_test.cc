// Who may connect to whom, and what a stranger hears.

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "rpc/authenticator.h"
#include "rpc/joined.h"

namespace moolink::rpc {
namespace {

crypto::Key token(int byte) {
  crypto::Key key;
  key.secret.fill(static_cast<std::byte>(byte));
  return key;
}

Authenticator holder(std::vector<crypto::Key> keys, int seed = 1) {
  return Authenticator(crypto::Keyring(std::move(keys)), "a test", token(seed).secret);
}

bool meet(const Authenticator& server, const Authenticator& client) {
  Joined pair(server, client);
  const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(20), 0);
  pair.pass(seconds(1));
  const bool met = std::holds_alternative<wire::Payload>(pair.client.results.at(id));
  if (!met) {
    CHECK(pair.error_of(id).code == ErrorCode::auth);
    CHECK(!pair.server.log.empty() && !pair.client.log.empty());
  }
  CHECK_EQ(pair.server.node.peers(pair.now).size(), met ? 1u : 0u);
  CHECK_EQ(pair.client.node.peers(pair.now).size(), met ? 1u : 0u);
  return met;
}

TEST("who holds a common key meets, whoever dials; nobody else does") {
  const Authenticator job = holder({token(1)});
  const Authenticator other = holder({token(2)});
  const Authenticator both = holder({token(2), token(1)});
  const Authenticator new_first = holder({token(2), token(3)});
  const Authenticator a = holder({token(1).of_group("a")});
  const Authenticator b = holder({token(1).of_group("b")});
  const Authenticator a_both = holder({token(2).of_group("a"), token(1).of_group("a")});
  const Authenticator open;
  const auto either_way = [](const Authenticator& x, const Authenticator& y) {
    const bool met = meet(x, y);
    CHECK_EQ(meet(y, x), met);
    return met;
  };
  CHECK(either_way(job, job) && either_way(open, open) && either_way(a, a));
  CHECK(either_way(job, both) && either_way(other, both) && either_way(new_first, both));
  CHECK(either_way(job, a) && either_way(job, b) && either_way(job, a_both));
  CHECK(either_way(both, a) && either_way(a, a_both));
  CHECK(!either_way(job, other) && !either_way(job, new_first) && !either_way(a, b));
  CHECK(!either_way(other, a) && !either_way(job, open) && !either_way(a, open));
}

TEST("both sides are told which keys differ, and whose; neither is told the other's files") {
  const Authenticator right = holder({token(1)});
  const Authenticator wrong = holder({token(2)});
  Joined pair(right, wrong);
  const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(20), 0);
  pair.pass(seconds(3));
  const std::string& error = pair.error_of(id).message;
  for (const std::string& text : {error, pair.server.log.front(), pair.client.log.front()}) {
    CHECK(text.find("key " + token(1).id()) != std::string::npos);
    CHECK(text.find("key " + token(2).id()) != std::string::npos);
    CHECK(text.find("'server'") != std::string::npos && text.find("'client'") != std::string::npos);
  }
  CHECK(error.find("tcp://10.0.0.1:1") != std::string::npos);
  CHECK(error.find("from a test") != std::string::npos);
  CHECK_EQ(pair.client.log.size(), 1u);  // it goes on trying, and says so once
}

TEST("one insecure side is named") {
  const Authenticator secure = holder({token(1)});
  const Authenticator open;
  Joined pair(secure, open);
  const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(20), 0);
  pair.pass(seconds(1));
  CHECK(pair.error_of(id).code == ErrorCode::auth);
  CHECK(pair.error_of(id).message.find("peer 'client' is insecure") != std::string::npos);
  CHECK(pair.server.log.front().find("peer 'client' is insecure") != std::string::npos);
}

TEST("functions of a group are not there for peers of another") {
  const Authenticator job = holder({token(1)});
  const Authenticator a = holder({token(1).of_group("a")});
  Joined pair(job, a);
  pair.server.node.define("of a", "a");
  pair.server.node.define("of b", "b");
  const auto call = [&](const char* function) {
    const CallId id = pair.client.node.call(pair.now, "server", function, {}, seconds(1), 0);
    pair.run();
    return id;
  };
  CHECK(std::holds_alternative<wire::Payload>(pair.client.results.at(call("of a"))));
  const Error of_b = pair.error_of(call("of b"));
  Error none = pair.error_of(call("none"));
  CHECK(of_b.code == ErrorCode::no_such_function);
  none.message.replace(none.message.find("none"), 4, "of b");
  CHECK_EQ(of_b.message, none.message);
  const auto peers = pair.server.node.peers(pair.now);
  CHECK_EQ(peers.at(0).scope, std::string("a"));
  CHECK(pair.server.node.may_concern(peers.at(0).instance, "a"));
  CHECK(!pair.server.node.may_concern(peers.at(0).instance, "b"));
}

// What a node writes in answer to one frame on a fresh connection.
std::vector<wire::Frame> answers(User& user, ConnectionId id, const wire::Frame& frame) {
  user.node.received(Time{seconds(200)}, id, as_received(frame));
  std::vector<Action> actions;
  user.node.drain(actions);
  std::vector<wire::Frame> written;
  for (Action& action : actions) {
    if (auto* write = std::get_if<Write>(&action)) written.push_back(std::move(write->frame));
  }
  return written;
}

wire::Hello greeting_of(const std::string& name, Uid instance) {
  wire::Hello hello;
  hello.name = name;
  hello.instance = instance;
  hello.max_frame = Limits{}.max_frame;
  return hello;
}

TEST("a stranger hears a proof that it cannot use, and nothing of names and sessions") {
  const Authenticator job = holder({token(1)});
  const Authenticator same = holder({token(1)}, 2);
  Joined pair(job, same);  // "client" is connected
  wire::Hello stranger = greeting_of("client", {2, 20});
  stranger.keys = {token(1).identity()};
  pair.server.node.opened(pair.now, 77, wire::PathKind::shm, {}, "");
  std::vector<wire::Frame> heard =
      answers(pair.server, 77, wire::make_frame(wire::FrameType::hello, stranger));
  CHECK_EQ(heard.size(), 1u);
  CHECK(heard.at(0).header.type == wire::FrameType::hello);
  const auto greeting = wire::decode<wire::Hello>(heard.at(0).control.span());
  CHECK(greeting.session == 0 && greeting.rx_next == 1 && greeting.rx_have.empty());
  // Reflected, it is refused.
  stranger.proof = greeting.proof;
  heard = answers(pair.server, 77, wire::make_frame(wire::FrameType::welcome, stranger));
  CHECK_EQ(heard.size(), 1u);
  CHECK(heard.at(0).header.type == wire::FrameType::refuse);
  // The peer that it pretended to be is as it was.
  const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(1), 0);
  pair.run();
  CHECK(std::holds_alternative<wire::Payload>(pair.client.results.at(id)));
}

// The greeting of a peer that speaks another range of versions, on a fresh connection.
wire::Frame greeting_of_versions(std::uint32_t oldest, std::uint32_t newest,
                                 const Authenticator& authenticator, wire::Hello& hello) {
  hello = greeting_of("client", {2, 20});
  hello.wire_min = oldest;
  hello.wire_max = newest;
  hello.features = ~std::uint64_t{0};
  hello.later.bytes.assign(100, std::byte{0xff});
  authenticator.introduce(hello, 1);
  return wire::make_frame(wire::FrameType::hello, hello);
}

TEST("a peer of the next version proves itself with fields that this one does not know") {
  const Authenticator job = holder({token(1)});
  const Authenticator same = holder({token(1)}, 2);
  for (const bool damaged : {false, true}) {
    User server("server", job, {1, 10});
    server.node.opened(Time{seconds(200)}, 77, wire::PathKind::tcp, {}, "");
    wire::Hello dialler;
    const wire::Frame hello =
        greeting_of_versions(wire::kVersion, wire::kVersion + 1, same, dialler);
    std::vector<wire::Frame> heard = answers(server, 77, hello);
    CHECK_EQ(heard.size(), 1u);
    const wire::Hello acceptor = wire::decode_hello(heard.at(0).control);
    wire::Hello welcome = dialler;
    if (damaged) dialler.later.bytes.front() = std::byte{0};  // the proof covers them
    const wire::Channel channel{wire::PathKind::tcp, {}};
    CHECK_EQ(same.check_acceptor(channel, dialler, acceptor, welcome).refusal.empty(), !damaged);
    heard = answers(server, 77, wire::make_frame(wire::FrameType::welcome, welcome));
    CHECK_EQ(heard.size(), 1u);
    const auto expected = damaged ? wire::FrameType::refuse : wire::FrameType::welcome;
    CHECK(heard.at(0).header.type == expected);
  }
}

TEST("a peer without a common version is refused, and hears which versions both speak") {
  const Authenticator open;
  const auto refusal_of = [&](std::uint32_t oldest, std::uint32_t newest) {
    User server("server", open, {1, 10});
    server.node.opened(Time{seconds(200)}, 77, wire::PathKind::tcp, {}, "");
    wire::Hello dialler;
    const auto heard = answers(server, 77, greeting_of_versions(oldest, newest, open, dialler));
    CHECK_EQ(heard.size(), 1u);
    CHECK(heard.at(0).header.type == wire::FrameType::refuse);
    return wire::decode<wire::Refuse>(heard.at(0).control.span()).text;
  };
  CHECK_EQ(refusal_of(wire::kVersion + 1, wire::kVersion + 2),
           std::string("peer 'client' speaks version 2 to 3 of the protocol, and peer 'server' "
                       "speaks version 1 of the protocol: update moolink where peer 'server' "
                       "runs"));
  CHECK(refusal_of(0, 0).ends_with("update moolink where peer 'client' runs"));
}

TEST("a proof made for one connection is good on no other, though every frame is carried over") {
  const Authenticator job = holder({token(1)});
  wire::PathTraits one;
  wire::PathTraits other;
  one.binding.fill(std::byte{1});
  other.binding.fill(std::byte{2});
  for (const wire::PathTraits& at_acceptor : {one, other, wire::PathTraits{}}) {
    Joined pair(job, job, {}, {wire::PathKind::tcp}, {at_acceptor, one});
    const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(20), 0);
    pair.pass(seconds(1));
    const bool same = at_acceptor.binding == one.binding;
    CHECK_EQ(std::holds_alternative<wire::Payload>(pair.client.results.at(id)), same);
    if (!same) CHECK(pair.error_of(id).code == ErrorCode::auth);
    CHECK_EQ(pair.server.node.peers(pair.now).size(), same ? 1u : 0u);
  }
}

TEST("who is refused by the path itself hears of it at once, and so does the other side's log") {
  const Authenticator job = holder({token(1)});
  Joined pair(job, job, {}, {wire::PathKind::tcp}, {{}, {}, true});
  const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(20), 0);
  pair.pass(seconds(1));
  CHECK(pair.error_of(id).code == ErrorCode::auth);
  CHECK(pair.error_of(id).message.find("it holds another key") != std::string::npos);
  CHECK(pair.error_of(id).message.find("from a test") != std::string::npos);
  CHECK_EQ(pair.client.log.size(), 1u);
  pair.server.node.turned_away(pair.now, make_error(ErrorCode::auth, "it shows another key"));
  pair.server.node.turned_away(pair.now, make_error(ErrorCode::auth, "it shows another key"));
  pair.server.node.turned_away(pair.now, make_error(ErrorCode::timeout, "it says nothing"));
  pair.run();
  CHECK_EQ(pair.server.log.size(), 1u);  // once, and no word of who merely came by
  CHECK(pair.server.log.at(0).find("another key") != std::string::npos);
}

TEST("calls end with a refusal once every address that the user requested refuses") {
  const Authenticator open;
  User user("client", open, {2, 20});
  const Time now{seconds(100)};
  user.node.connect(now, "tcp://10.0.0.1:1");
  user.node.connect(now, "tcp://10.0.0.2:1");
  user.node.call(now, "server", "echo", {}, seconds(20), 0);
  user.node.tick(now);
  const auto ended_by = [&](const char* address) {
    user.node.dial_failed(now, address, make_error(ErrorCode::auth, "it holds another key"));
    std::vector<Action> actions;
    user.node.drain(actions);
    return std::ranges::any_of(
        actions, [](const Action& action) { return std::holds_alternative<Complete>(action); });
  };
  CHECK(!ended_by("tcp://10.0.0.1:1"));  // the other one may lead to it
  CHECK(ended_by("tcp://10.0.0.2:1"));
}

TEST("who refuses a dial does not speak for the name it claims: others may know that peer") {
  const Authenticator open;
  Joined pair(open, open);
  const CallId id = pair.client.node.call(pair.now, "learner", "echo", {}, seconds(20), 0);
  pair.run();
  const std::string address = "tcp://10.0.0.9:1";
  pair.client.node.connect(pair.now, address);
  pair.client.node.tick(pair.now);
  std::vector<Action> actions;
  pair.client.node.drain(actions);
  CHECK(std::ranges::any_of(actions, [&](const Action& action) {
    const auto* dial = std::get_if<Dial>(&action);
    return dial != nullptr && dial->address == address;
  }));
  Error refusal = make_error(ErrorCode::auth, "it holds another key");
  refusal.peer = "learner";
  pair.client.node.dial_failed(pair.now, address, refusal);
  pair.run();
  CHECK(!pair.client.results.contains(id));
}

TEST("who answers a dial cannot keep this peer from dialling there again") {
  const Authenticator open;
  User user("client", open, {2, 20});
  Time now{seconds(100)};
  const std::string address = "tcp://10.0.0.9:1";
  user.node.connect(now, address);
  const auto dials = [&] {
    user.node.tick(now);
    std::vector<Action> actions;
    user.node.drain(actions);
    return std::ranges::count_if(
        actions, [](const Action& action) { return std::holds_alternative<Dial>(action); });
  };
  CHECK_EQ(dials(), 1);
  user.node.opened(now, 7, wire::PathKind::tcp, {}, address);
  const wire::Refuse refusal{ErrorCode::invalid_argument, "this is the peer itself", "client"};
  user.node.received(now, 7, as_received(wire::make_frame(wire::FrameType::refuse, refusal)));
  now += seconds(1);
  CHECK_EQ(dials(), 1);
}

TEST("a peer that has dialled itself does so once") {
  const Authenticator open;
  User user("client", open, {2, 20});
  Time now{seconds(100)};
  const std::string address = "tcp://10.0.0.9:1";
  user.node.connect(now, address);
  user.node.tick(now);
  user.node.opened(now, 7, wire::PathKind::tcp, {}, address);
  user.node.opened(now, 8, wire::PathKind::tcp, {}, "");
  std::vector<Action> actions;
  for (int i = 0; i < 3; ++i) {
    user.node.drain(actions);
    for (const Action& action : actions) {
      const auto* write = std::get_if<Write>(&action);
      if (write == nullptr) continue;
      user.node.received(now, write->connection == 7 ? 8 : 7, as_received(write->frame));
    }
  }
  now += seconds(10);
  user.node.tick(now);
  user.node.drain(actions);
  CHECK(std::ranges::none_of(
      actions, [](const Action& action) { return std::holds_alternative<Dial>(action); }));
}

TEST("a nonce is never the same twice, and is no function of the one before") {
  const Authenticator one = holder({token(1)}, 1);
  const Authenticator two = holder({token(1)}, 2);
  wire::Hello a, b, c;
  one.introduce(a, 1);
  one.introduce(b, 2);
  two.introduce(c, 1);
  CHECK(a.nonce != b.nonce && a.nonce != c.nonce && b.nonce != c.nonce);
}

}  // namespace
}  // namespace moolink::rpc
