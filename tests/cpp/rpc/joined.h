#pragma once

// Two nodes and what carries their frames to and fro.

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "rpc/node.h"

namespace moolink::rpc {

struct User {
  User(const std::string& name, const Authenticator& authenticator, Uid instance, Uid host = {})
      : node(
            [&] {
              Config config;
              config.host_key = host;
              config.instance = instance;
              config.name = name;
              return config;
            }(),
            allocator, authenticator) {}

  HeapAllocator allocator;
  Node node;
  std::map<CallId, Reply> results;
  std::vector<std::string> log;
  int service_messages = 0;
  int undelivered = 0;
  bool closed = false;
};

inline wire::ReceivedFrame as_received(const wire::Frame& frame) {
  auto bytes = std::make_shared<std::vector<std::byte>>(frame.control.span().begin(),
                                                        frame.control.span().end());
  for (const Buffer& piece : frame.payload) {
    bytes->insert(bytes->end(), piece.span().begin(), piece.span().end());
  }
  return {frame.header, Buffer(bytes, bytes->data(), bytes->size())};
}

// What lies between the two.
struct Way {
  wire::PathTraits server;
  wire::PathTraits client;
  bool refuses = false;  // the path's own handshake fails
  Uid server_host{};     // the client's is empty
  bool rdma = false;     // whether dialling by RDMA succeeds
};

// A server "server" and a client "client" that dials it; every handler returns its arguments.
struct Joined {
  Joined(const Authenticator& server_authenticator, const Authenticator& client_authenticator,
         const std::vector<std::string>& server_addresses = {},
         std::vector<wire::PathKind> client_paths = {wire::PathKind::shm, wire::PathKind::tcp},
         Way the_way = {})
      : server("server", server_authenticator, {1, 10}, the_way.server_host),
        client("client", client_authenticator, {2, 20}),
        way(the_way) {
    server.node.define("echo");
    server.node.listening(server_addresses);
    client.node.set_paths(std::move(client_paths));
    client.node.connect(now, "tcp://10.0.0.1:1");
    pass(milliseconds(10));
  }

  void run() {
    for (bool acted = true; acted;) {
      acted = carry_out(server, client);
      acted = carry_out(client, server) || acted;
    }
  }
  // Lets the time pass, with all that is due in it.
  void pass(Duration duration) {
    for (const Time end = now + duration; now < end;) {
      now = std::min(end, now + milliseconds(10));
      server.node.tick(now);
      client.node.tick(now);
      run();
    }
  }
  // All connections by RDMA end, and no new one can be made.
  void lose_rdma() {
    way.rdma = false;
    for (const ConnectionId id : std::exchange(by_rdma, {})) lose(id);
  }
  void lose(ConnectionId id) {
    const Error error = make_error(ErrorCode::peer_lost, "the port is down");
    client.node.closed(now, id, error);
    server.node.closed(now, id, error);
  }
  const Error& error_of(CallId id) { return std::get<Error>(client.results.at(id)); }

  bool carry_out(User& user, User& other) {
    std::vector<Action> actions;
    user.node.drain(actions);
    for (Action& action : actions) {
      if (auto* write = std::get_if<Write>(&action)) {
        if (connected && write->connection > dropped) {
          other.node.received(now, write->connection, as_received(write->frame));
        }
      } else if (auto* dial = std::get_if<Dial>(&action);
                 dial != nullptr && way.rdma && dial->address.starts_with("verbs://10.")) {
        const ConnectionId id = kFirstByRdma + next_by_rdma++;
        wire::PathTraits traits;
        traits.preference = 10;
        by_rdma.push_back(id);
        server.node.opened(now, id, wire::PathKind::verbs, traits, "");
        client.node.opened(now, id, wire::PathKind::verbs, traits, dial->address);
      } else if (dial != nullptr && !dial->address.starts_with("tcp://10.")) {
        user.node.dial_failed(now, dial->address, make_error(ErrorCode::error, "no way"));
      } else if (dial != nullptr) {
        if (way.refuses) {
          user.node.dial_failed(now, dial->address,
                                make_error(ErrorCode::auth, "it holds another key"));
          continue;
        }
        connected = true;
        ++connection;
        server.node.opened(now, connection, wire::PathKind::tcp, way.server, "");
        client.node.opened(now, connection, wire::PathKind::tcp, way.client, "tcp://10.0.0.1:1");
      } else if (auto* close = std::get_if<CloseConnection>(&action)) {
        if (std::erase(by_rdma, close->connection) != 0 ||
            (close->connection == connection && std::exchange(connected, false))) {
          other.node.closed(now, close->connection, make_error(ErrorCode::closed, "closed"));
        }
      } else if (auto* handler = std::get_if<RunHandler>(&action)) {
        user.node.reply(now, handler->key, std::move(handler->arguments));
      } else if (auto* complete = std::get_if<Complete>(&action)) {
        CHECK(user.results.emplace(complete->id, std::move(complete->result)).second);
      } else if (auto* line = std::get_if<Log>(&action)) {
        user.log.push_back(line->text);
      } else if (std::get_if<ServiceMessage>(&action) != nullptr) {
        ++user.service_messages;
      } else if (std::get_if<Undelivered>(&action) != nullptr) {
        ++user.undelivered;
      } else if (std::get_if<Closed>(&action) != nullptr) {
        user.closed = true;
      }
    }
    return !actions.empty();
  }

  Time now{seconds(100)};
  User server;
  User client;
  Way way;
  static constexpr ConnectionId kFirstByRdma = 1'000'000;
  std::vector<ConnectionId> by_rdma;
  ConnectionId next_by_rdma = 0;
  ConnectionId connection = 0;  // the last one by tcp
  bool connected = false;
  ConnectionId dropped = 0;  // what is written to this one and to earlier ones is lost
};

}  // namespace moolink::rpc
