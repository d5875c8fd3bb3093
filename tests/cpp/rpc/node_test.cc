#include "rpc/node.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "rpc/joined.h"

namespace moolink::rpc {
namespace {

TEST("an unknown peer, an unknown function, a closed peer: each error says what happened") {
  const Authenticator open;
  Joined pair(open, open);
  const CallId unknown = pair.client.node.call(pair.now, "nobody", "echo", {}, seconds(1), 0);
  const CallId missing = pair.client.node.call(pair.now, "server", "none", {}, seconds(1), 0);
  pair.run();
  CHECK(pair.error_of(missing).code == ErrorCode::no_such_function);
  pair.pass(seconds(1));
  CHECK(pair.error_of(unknown).code == ErrorCode::timeout);
  CHECK(pair.error_of(unknown).message.find("'nobody' is not known to any connected peer") !=
        std::string::npos);
  CHECK_THROWS((pair.client.node.set_name("other"), 0), ErrorCode::invalid_argument);

  pair.server.node.undefine("echo");
  pair.client.node.close(pair.now);
  pair.pass(milliseconds(100));
  CHECK(pair.client.closed);
  CHECK(pair.server.node.peers(pair.now).empty());
  const CallId late = pair.client.node.call(pair.now, "server", "echo", {}, seconds(1), 0);
  pair.run();
  CHECK(pair.error_of(late).code == ErrorCode::closed);
}

TEST(
    "calls that reach a peer while it closes are lost with it: closed is said of one's own "
    "object") {
  const Authenticator open;
  Joined pair(open, open);
  // What the server has on its way keeps it for a moment.
  pair.server.node.call(pair.now, "client", "none", {}, seconds(1), 0);
  pair.server.node.close(pair.now);
  const CallId met = pair.client.node.call(pair.now, "server", "echo", {}, seconds(1), 0);
  pair.run();
  CHECK(pair.error_of(met).code == ErrorCode::peer_lost);
  CHECK(pair.error_of(met).ran == Ran::no);
  CHECK(pair.error_of(met).message.find("closes") != std::string::npos);
}

// The lanes of the messages that a node writes; nothing of them arrives.
std::vector<int> lanes_written(User& user) {
  std::vector<Action> actions;
  user.node.drain(actions);
  std::vector<int> lanes;
  for (const Action& action : actions) {
    const auto* write = std::get_if<Write>(&action);
    if (write != nullptr && write->frame.header.type == wire::FrameType::message) {
      lanes.push_back(write->frame.header.lane);
    }
  }
  return lanes;
}

TEST("small calls of other lanes overtake a large one that waits for the window") {
  const Authenticator open;
  Joined pair(open, open);
  const auto call = [&](std::size_t bytes, std::uint16_t lane) {
    wire::Payload payload;
    if (bytes > 0) payload.parts.push_back(pair.client.allocator.allocate(bytes));
    pair.client.node.call(pair.now, "server", "echo", std::move(payload), seconds(1), lane);
  };
  const std::size_t large = Limits{}.send_window_bytes / 2 + 1;
  call(large, 1);
  call(large, 2);  // waits
  call(100, 2);    // behind it
  call(100, 3);
  call(large / 4, 4);  // would fit, and could keep the one that waits from its turn for ever
  call(100, 0);
  const std::vector<int> lanes = lanes_written(pair.client);
  CHECK(lanes == std::vector<int>({1, 3, 0}));
}

TEST("a peer calls itself") {
  const Authenticator open;
  Joined pair(open, open);
  const CallId id = pair.server.node.call(pair.now, "server", "echo", {}, seconds(1), 3);
  pair.run();
  CHECK(std::holds_alternative<wire::Payload>(pair.server.results.at(id)));
}

TEST("a connection that is dropped without a word is dialled anew, and nothing is lost") {
  const Authenticator open;
  Joined pair(open, open);
  pair.dropped = pair.connection;
  const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(20), 0);
  pair.pass(milliseconds(900));
  CHECK(pair.client.results.empty());
  CHECK_EQ(pair.connection, 1u);
  pair.pass(seconds(1));
  CHECK_EQ(pair.connection, 2u);
  CHECK(std::holds_alternative<wire::Payload>(pair.client.results.at(id)));
  const Explanation known = pair.client.node.explain(pair.now, "server");
  CHECK(known.connected && !known.suspected);
  pair.pass(seconds(10));
  CHECK_EQ(pair.connection, 2u);  // it is heard of: nothing more to do
  CHECK_EQ(pair.client.node.peers(pair.now).size(), 1u);
}

TEST("what is silent is explained, then given up") {
  const Authenticator open;
  Joined pair(open, open);
  pair.dropped = 1000;
  pair.pass(milliseconds(1500));
  Explanation known = pair.client.node.explain(pair.now, "server");
  CHECK(known.connected && known.suspected);
  CHECK(known.reason.find("(suspected)") != std::string::npos);
  pair.pass(seconds(3));
  known = pair.client.node.explain(pair.now, "server");
  CHECK(!known.connected);
  CHECK(known.reason.find("lost: the peer was silent for too long") != std::string::npos);
}

TEST("each better path that is not in use has its reason") {
  const Authenticator open;
  Joined pair(open, open, {"shm://host/1", "tcp://10.0.0.1:1"});
  const auto path = [&](std::size_t at) {
    return pair.client.node.explain(pair.now, "server").paths.at(at);
  };
  const auto says = [&](const char* words) {
    return path(0).reason.find(words) != std::string::npos;
  };
  pair.pass(milliseconds(10));
  CHECK(path(0).kind == wire::PathKind::shm && !path(0).live);
  CHECK(says("dial failed: no way"));
  pair.pass(seconds(5));
  CHECK(says("tried 3 times, given up: no way"));
  CHECK_EQ(pair.client.log.size(), 1u);  // the fallback is told, once
  CHECK(path(1).in_use && path(1).reason.empty() && path(1).round_trip >= Duration(0));
  CHECK_EQ(path(1).address, "tcp://10.0.0.1:1");
  // The server has not dialled, and the client announces nothing.
  const Explanation other = pair.server.node.explain(pair.now, "client");
  CHECK(other.paths.at(0).reason == "the peer does not offer it");
  CHECK(other.paths.at(1).in_use);

  Joined plain(open, open);
  CHECK_EQ(plain.client.node.explain(plain.now, "server").paths.at(0).reason,
           "the peer does not offer it");
}

TEST("a path that is not enabled is neither dialled nor called a fallback") {
  const Authenticator open;
  Joined pair(open, open, {"shm://host/1", "tcp://10.0.0.1:1"}, {wire::PathKind::tcp});
  pair.pass(seconds(1));
  const Explanation known = pair.client.node.explain(pair.now, "server");
  CHECK_EQ(known.paths.at(0).reason, "not enabled here");
  CHECK(known.tried.empty());
  CHECK(pair.client.log.empty());
}

// The server is on a host of its own, which RDMA reaches or not.
Way to_another_host(bool rdma) {
  Way way;
  way.server_host = {7, 7};
  way.rdma = rdma;
  return way;
}

TEST("a peer of another host is dialled by RDMA beside tcp, at one address, and not for ever") {
  const Authenticator open;
  const std::vector<std::string> addresses = {"tcp://10.0.0.1:1", "verbs://127.0.0.1:2",
                                              "verbs://10.0.0.1:2", "verbs://10.0.1.1:2"};
  Joined pair(open, open, addresses, {wire::PathKind::verbs, wire::PathKind::tcp},
              to_another_host(false));
  const auto verbs = [&] { return pair.client.node.explain(pair.now, "server").paths.at(1); };
  CHECK(verbs().kind == wire::PathKind::verbs);
  CHECK(pair.client.node.explain(pair.now, "server").paths.at(2).in_use);
  pair.pass(milliseconds(10));
  CHECK_EQ(verbs().reason, "dial failed: no way (tried once)");
  pair.pass(seconds(5));
  CHECK_EQ(verbs().reason, "tried 3 times, given up: no way");
  CHECK_EQ(pair.client.node.explain(pair.now, "server").tried.size(), 1u);
  CHECK_EQ(pair.client.log.size(), 1u);
  CHECK(pair.client.log.at(0).find("peer 'server' has RDMA, but verbs://10.0.0.1:2 cannot") !=
        std::string::npos);
  // One of the same host has shared memory.
  Joined near(open, open, addresses, {wire::PathKind::verbs, wire::PathKind::tcp});
  near.pass(seconds(1));
  CHECK_EQ(near.client.node.explain(near.now, "server").tried.size(), 0u);
}

TEST("RDMA that is lost is told of once, dialled until it is back, and used again") {
  const Authenticator open;
  Joined pair(open, open, {"tcp://10.0.0.1:1", "verbs://10.0.0.1:2"},
              {wire::PathKind::verbs, wire::PathKind::tcp}, to_another_host(true));
  const auto path = [&](std::size_t at) {
    return pair.client.node.explain(pair.now, "server").paths.at(at);
  };
  const auto answered = [&] {
    const CallId id = pair.client.node.call(pair.now, "server", "echo", {}, seconds(60), 0);
    pair.run();
    return pair.client.results.contains(id);
  };
  pair.pass(milliseconds(10));
  CHECK(path(1).in_use && path(2).live);
  CHECK(pair.client.node.explain(pair.now, "server").reason.find("not encrypted") !=
        std::string::npos);
  CHECK(answered() && pair.client.log.empty());

  pair.lose_rdma();
  CHECK(answered());
  pair.pass(seconds(20));
  CHECK(path(2).in_use && path(1).reason.starts_with("dial failed: no way"));
  CHECK_EQ(pair.client.log.size(), 1u);
  CHECK_EQ(pair.client.log.at(0),
           "RDMA to peer 'server' is lost: another path is used until it is back: no way");

  pair.way.rdma = true;
  pair.pass(seconds(1));
  CHECK(path(1).in_use && answered());
  CHECK_EQ(pair.client.log.size(), 2u);

  // Both paths are lost, tcp is back first.
  pair.lose_rdma();
  pair.lose(pair.connection);
  pair.pass(seconds(2));
  CHECK(path(2).in_use && answered());
  pair.way.rdma = true;
  pair.pass(seconds(1));
  CHECK(path(1).in_use && answered());
  CHECK_EQ(pair.client.log.size(), 4u);
}

TEST("an address for RDMA that is not on the way by which a peer was reached is dialled, too") {
  const Authenticator open;
  Joined pair(open, open, {"tcp://gate.example.org:5000", "verbs://10.0.1.1:2"},
              {wire::PathKind::verbs, wire::PathKind::tcp}, to_another_host(true));
  pair.pass(milliseconds(10));
  CHECK_EQ(pair.client.node.explain(pair.now, "server").paths.at(1).address, "verbs://10.0.1.1:2");
}

TEST("why there is no RDMA is told where it is missed") {
  const Authenticator open;
  Joined near(open, open);
  CHECK_EQ(near.client.node.explain(near.now, "server").paths.size(), 2u);
  Joined pair(open, open, {"verbs://10.0.0.1:2"}, {wire::PathKind::tcp});
  const auto reason = [&] {
    const Explanation known = pair.client.node.explain(pair.now, "server");
    CHECK_EQ(known.paths.size(), 3u);
    CHECK(known.paths.at(1).kind == wire::PathKind::verbs);
    CHECK(known.tried.empty());
    return known.paths.at(1).reason;
  };
  CHECK_EQ(reason(), "not enabled here");
  pair.client.node.set_paths({wire::PathKind::tcp}, {{wire::PathKind::verbs, "no RDMA device"}});
  CHECK_EQ(reason(), "no RDMA device");
}

TEST("of a peer that is not there it is told who was asked and what was tried") {
  const Authenticator open;
  Joined pair(open, open);
  Node& node = pair.client.node;
  CHECK(node.explain(pair.now, "nobody").reason.find("no call has asked") != std::string::npos);
  node.connect(pair.now, "tcp://192.0.2.1:1");
  node.call(pair.now, "nobody", "echo", {}, seconds(2), 0);
  pair.pass(seconds(1));
  const auto check = [&](const char* reason) {
    const Explanation absent = node.explain(pair.now, "nobody");
    CHECK(!absent.connected && absent.paths.empty());
    CHECK(absent.asked == std::vector<std::string>{"server"});
    CHECK_EQ(absent.tried.size(), 1u);
    CHECK_EQ(absent.tried.begin()->first, "tcp://192.0.2.1:1");
    CHECK_EQ(absent.tried.begin()->second.error, "no way");
    CHECK(absent.tried.begin()->second.tries > 1);
    CHECK(absent.reason.find(reason) != std::string::npos);
  };
  check("not known to any connected peer");
  CHECK_EQ(node.searched_names().size(), 1u);
  CHECK_EQ(node.pending_calls(pair.now).at(0).peer, "nobody");
  CHECK(node.pending_calls(pair.now).at(0).age == seconds(1));
  pair.pass(seconds(4));  // the call has timed out
  CHECK(node.pending_calls(pair.now).empty());
  check("not found; no call waits for it any more");
  CHECK(node.explain(pair.now, "client").reason.find("this very peer") != std::string::npos);
}

// A server and clients that dial it, each over a connection of its own.
struct Crowd {
  Crowd() { server.node.define("echo"); }

  User& dial(const std::string& name, Uid instance) {
    const ConnectionId id = ++connections;
    User& client = *clients.emplace(id, std::make_unique<User>(name, open, instance)).first->second;
    server.node.opened(now, id, wire::PathKind::tcp, {}, "");
    client.node.opened(now, id, wire::PathKind::tcp, {}, "tcp://10.0.0.1:1");
    run();
    return client;
  }
  void hang_up(User& client) {
    client.node.close(now);
    run();
  }
  void run() {
    for (bool acted = true; acted;) {
      acted = false;
      std::vector<Action> actions;
      server.node.drain(actions);
      for (Action& action : actions) {
        acted = true;
        if (auto* write = std::get_if<Write>(&action)) {
          const auto client = clients.find(write->connection);
          if (client != clients.end()) {
            client->second->node.received(now, write->connection, as_received(write->frame));
          }
        } else if (auto* close = std::get_if<CloseConnection>(&action)) {
          if (const auto client = clients.find(close->connection); client != clients.end()) {
            client->second->node.closed(now, close->connection, close->error);
          }
        } else if (auto* line = std::get_if<Log>(&action)) {
          server.log.push_back(line->text);
        }
      }
      for (const auto& [id, client] : clients) {
        client->node.drain(actions);
        for (Action& action : actions) {
          acted = true;
          if (auto* write = std::get_if<Write>(&action)) {
            server.node.received(now, id, as_received(write->frame));
          }
        }
      }
    }
  }
  std::vector<std::string> peers() {
    std::vector<std::string> names;
    for (const PeerInfo& peer : server.node.peers(now)) names.push_back(peer.name);
    return names;
  }

  Time now{seconds(100)};
  Authenticator open;
  User server{"server", open, {1, 10}};
  std::map<ConnectionId, std::unique_ptr<User>> clients;
  ConnectionId connections = 0;
};

TEST("an instance keeps its name, and the name is free when the instance is gone") {
  Crowd crowd;
  User& first = crowd.dial("learner", {2, 20});
  CHECK(crowd.peers() == std::vector<std::string>{"learner"});
  crowd.dial("other", {2, 20});
  CHECK(crowd.peers() == std::vector<std::string>{"learner"});
  CHECK(!crowd.server.log.empty() &&
        crowd.server.log.back().find("calls itself 'other'") != std::string::npos);
  crowd.hang_up(first);
  CHECK(crowd.peers().empty());
  crowd.dial("learner", {3, 30});
  CHECK(crowd.peers() == std::vector<std::string>{"learner"});
}

TEST("a refusal with a text that is not UTF-8 ends its connection and reaches no log") {
  Crowd crowd;
  crowd.server.node.opened(crowd.now, 7, wire::PathKind::tcp, {}, "");
  const wire::Frame frame =
      wire::make_frame(wire::FrameType::refuse, wire::Refuse{ErrorCode::error, "no\xff", {}});
  crowd.server.node.received(crowd.now, 7, as_received(frame));
  std::vector<Action> actions;
  crowd.server.node.drain(actions);
  bool closed = false;
  for (const Action& action : actions) {
    closed = closed || std::holds_alternative<CloseConnection>(action);
    const auto* line = std::get_if<Log>(&action);
    CHECK(line == nullptr || line->text.find('\xff') == std::string::npos);
  }
  CHECK(closed);
}

// A message for an instance that has ended, where another one bears its name now.
std::pair<int, int> send_to_another_instance() {
  const Authenticator open;
  Joined joined(open, open);
  joined.client.node.send_service_to(joined.now, {9, 90}, "server", Service::group, {});
  joined.pass(seconds(5));
  return {joined.server.service_messages, joined.client.undelivered};
}

TEST("a service message for one instance does not reach another one of its name") {
  CHECK(send_to_another_instance() == std::pair(0, 1));
}

}  // namespace
}  // namespace moolink::rpc
