// What one peer can make another hold, and what becomes of a message that there is no memory for.

#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "rpc/log_limit.h"
#include "rpc/messages.h"
#include "rpc/node.h"

namespace moolink::rpc {
namespace {

class LimitedAllocator final : public Allocator {
 public:
  MutableBuffer allocate(std::size_t size) override {
    if (size > most) throw std::bad_alloc();
    return heap_.allocate(size);
  }

  std::size_t most = ~std::size_t{0};

 private:
  HeapAllocator heap_;
};

wire::ReceivedFrame as_received(const wire::Frame& frame) {
  auto bytes = std::make_shared<std::vector<std::byte>>(frame.control.span().begin(),
                                                        frame.control.span().end());
  for (const Buffer& piece : frame.payload) {
    bytes->insert(bytes->end(), piece.span().begin(), piece.span().end());
  }
  return {frame.header, Buffer(bytes, bytes->data(), bytes->size())};
}

TEST("a body that lies where its sender may still write is copied before it is read") {
  const MutableBuffer memory = HeapAllocator().allocate(100);
  const MutableBuffer tensor = HeapAllocator().allocate(100);
  memory.data()[7] = std::byte{3};
  wire::Payload message{{}, {memory, tensor}};
  CHECK(user_payload(message).body.data() == memory.data());
  message.exposed = {1};
  CHECK(user_payload(message).body.data() == memory.data());
  message.exposed = {0, 1};
  const wire::Payload user = user_payload(message);
  memory.data()[7] = std::byte{4};
  CHECK(user.body.size() == 100 && user.body.data()[7] == std::byte{3});
  CHECK(user.parts.at(0).data() == tensor.data());
}

Config server_config() {
  Config config;
  config.instance = {1, 10};
  config.name = "server";
  config.max_running_calls = 10;
  config.max_running_bytes = std::size_t{1} << 20;
  config.max_queued_bytes = std::size_t{1} << 20;
  config.max_waiting_calls = 20;
  config.limits.send_window_messages = 16;
  return config;
}

Config client_config(std::size_t window) {
  Config config;
  config.limits.send_window_messages = window;
  config.instance = {2, 20};
  config.name = "client";
  return config;
}

// A server whose handlers never reply, and a client that is connected to it.
struct Pair {
  explicit Pair(std::size_t window = 16) : client_window(window) {
    server.define("wait");
    client.connect(now, "tcp://10.0.0.1:1");
    pass(milliseconds(20));
  }

  void pass(Duration duration) {
    for (const Time end = now + duration; now < end; now += milliseconds(10)) {
      server.tick(now);
      client.tick(now);
      run();
    }
  }
  void run() {
    for (bool acted = true; acted;) {
      acted = carry_out(server, client);
      acted = carry_out(client, server) || acted;
    }
  }
  bool carry_out(Node& node, Node& other) {
    std::vector<Action> actions;
    node.drain(actions);
    for (Action& action : actions) {
      if (auto* write = std::get_if<Write>(&action)) {
        if (connected && !stays(*write, node)) transmit(other, *write);
      } else if (const auto* dial = std::get_if<Dial>(&action);
                 dial != nullptr && dial->address != "tcp://10.0.0.1:1") {
        ++dialled_in_vain;
      } else if (dial != nullptr) {
        connected = true;
        server.opened(now, ++connection, wire::PathKind::tcp, {}, "");
        client.opened(now, connection, wire::PathKind::tcp, {}, "tcp://10.0.0.1:1");
      } else if (std::get_if<CloseConnection>(&action) != nullptr) {
        if (std::exchange(connected, false)) {
          other.closed(now, connection, make_error(ErrorCode::closed, "closed"));
        }
      } else if (const auto* run = std::get_if<RunHandler>(&action)) {
        running.push_back(run->key);
      } else if (const auto* hold = std::get_if<HoldHandlers>(&action)) {
        handlers_held.push_back(hold->hold);
      } else if (const auto* log = std::get_if<Log>(&action)) {
        logged += log->text;
      } else if (auto* complete = std::get_if<Complete>(&action)) {
        if (auto* error = std::get_if<Error>(&complete->result)) errors.push_back(*error);
      } else if (auto* down = std::get_if<PeerDown>(&action)) {
        (&node == &server ? server_lost : client_lost) += down->name;
      }
    }
    return !actions.empty();
  }
  // Lost on its way, or held up.
  bool stays(const Write& write, const Node& from) {
    const wire::FrameType type = write.frame.header.type;
    if (&from == &server) return mute || (lose_windows && type == wire::FrameType::window);
    if (!hold_calls || type != wire::FrameType::message) return false;
    const auto head = wire::decode_control<wire::MessageHead>(as_received(write.frame));
    if (head.kind != static_cast<std::uint8_t>(MessageKind::call)) return false;
    held.push_back(write);
    return true;
  }
  // As a transport does: the bytes of a chunk go straight to where they belong.
  void transmit(Node& other, const Write& write) {
    const wire::ReceivedFrame frame = as_received(write.frame);
    if (frame.header.type != wire::FrameType::chunk) {
      return other.received(now, write.connection, frame);
    }
    const auto head = wire::decode_control<wire::ChunkHead>(frame);
    (void)other.chunk_target(write.connection, head);
    other.event(&session::Session::chunk_received, now, write.connection, head);
    Node& sender = &other == &server ? client : server;
    sender.event(&session::Session::writable, now, write.connection);
  }

  std::size_t client_window;
  Time now{seconds(100)};
  Authenticator open;
  LimitedAllocator server_memory;
  LimitedAllocator client_memory;
  Node server{server_config(), server_memory, open};
  Node client{client_config(client_window), client_memory, open};
  ConnectionId connection = 0;
  bool connected = false;
  bool lose_windows = false;        // of the server
  bool mute = false;                // the server, in all that it sends
  bool hold_calls = false;          // of the client
  std::vector<Write> held;          // ... in order
  std::vector<CallKey> running;     // at the server, in order
  std::vector<bool> handlers_held;  // ... each HoldHandlers
  std::string logged;               // by both
  std::size_t dialled_in_vain = 0;  // none of these is answered
  std::vector<Error> errors;
  std::string server_lost;
  std::string client_lost;
};

TEST("a message over the limits is refused when it is kept for a peer, not when that is up") {
  Config config = client_config(16);
  config.limits.max_parts = 2;
  HeapAllocator allocator;
  const Authenticator open;
  Node client(config, allocator, open);
  const Time now{seconds(100)};
  const wire::Payload most{{}, std::vector<Buffer>(1)};  // its body is a part, too
  const wire::Payload more{{}, std::vector<Buffer>(2)};
  client.send_service_to(now, {}, "server", Service::group, most);
  CHECK_THROWS((client.send_service_to(now, {}, "server", Service::group, more), 0),
               ErrorCode::invalid_argument);
  CHECK_THROWS((client.send_service_to(now, {1, 10}, "server", Service::group, more), 0),
               ErrorCode::invalid_argument);
}

TEST("a peer that goes on calling when it was told to wait is cut off") {
  Pair pair(4096);
  pair.lose_windows = true;
  for (int i = 0; i < 1000; ++i) {
    pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0);
    pair.run();
  }
  CHECK_EQ(pair.server_lost, std::string("client"));
  CHECK(pair.running.size() >= 10 + 4 * 16 && pair.running.size() <= 12 + 4 * 16);
}

TEST("a peer that waits when it was told to is not") {
  Pair pair;
  for (int i = 0; i < 1000; ++i) pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0);
  pair.pass(seconds(2));
  CHECK(pair.server_lost.empty() && pair.errors.empty());
  CHECK(pair.running.size() >= 11);
  CHECK_EQ(pair.server.peers(pair.now).size(), 1u);
}

TEST("a peer that takes no replies is cut off before too many wait for it") {
  Pair pair(4096);
  pair.lose_windows = true;
  for (int i = 0; i < 60; ++i) {
    pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0);
    pair.run();
  }
  CHECK_EQ(pair.running.size(), 60u);
  pair.mute = true;
  std::size_t replies = 0;
  while (pair.server_lost.empty() && replies < pair.running.size()) {
    pair.server.reply(pair.now, pair.running[replies++], wire::Payload{});
    pair.run();
  }
  CHECK_EQ(pair.server_lost, std::string("client"));
  CHECK_EQ(replies, 16u + 20u + 1u);  // on their way, waiting, and one too many
  CHECK(pair.logged.find("'client' takes nothing") != std::string::npos);
}

TEST("handlers of a peer that takes no results are held back, until they go or it does") {
  Pair pair(4096);
  pair.lose_windows = true;
  for (int i = 0; i < 40; ++i) {
    pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0);
    pair.run();
  }
  pair.mute = true;
  const auto reply = [&](std::size_t number) {
    pair.server.reply(pair.now, pair.running[number],
                      wire::Payload{HeapAllocator().allocate(100'000), {}});
    pair.run();
  };
  // 16 are on their way: 10 wait that are not more than 1 MB together.
  for (std::size_t i = 0; i < 26; ++i) reply(i);
  CHECK(pair.handlers_held.empty());
  reply(26);
  CHECK(pair.handlers_held == std::vector{true});
  reply(27);
  CHECK(pair.handlers_held == std::vector{true});
  pair.server.peer_dead(pair.now, {2, 20});
  pair.run();
  CHECK(pair.handlers_held == (std::vector{true, false}));
}

TEST("a stream that asks for more than 1,024 items later on is refused") {
  Pair pair;
  const auto stream = [&](std::uint64_t credit) {
    return pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0, credit);
  };
  CHECK_THROWS(stream(1025), ErrorCode::invalid_argument);
  for (const std::uint64_t more : {2, 3}) {
    const CallId id = stream(1024);
    pair.run();
    for (int i = 0; i < 2; ++i) pair.server.send_item(pair.now, pair.running.back(), {});
    pair.run();
    CHECK(pair.server_lost.empty());
    pair.client.raise_credit(pair.now, id, more);  // two were sent
    pair.run();
    CHECK_EQ(pair.server_lost.empty(), more == 2);
  }
}

TEST("a stream that asks for more than 1,024 items from its beginning is refused") {
  for (const std::uint64_t credit : {1024, 1025}) {
    Pair pair;
    pair.hold_calls = true;
    pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0, 1024);
    pair.run();
    CHECK_EQ(pair.held.size(), 1u);
    Buffer& body = pair.held[0].frame.payload.front();
    auto head = wire::decode<CallHead>(body);
    head.credit = credit;
    const Buffer changed = wire::encode(head);
    CHECK_EQ(changed.size(), body.size());
    body = changed;
    pair.transmit(pair.server, pair.held[0]);
    pair.run();
    CHECK_EQ(pair.server_lost.empty(), credit == 1024);
    CHECK_EQ(pair.running.size(), credit == 1024 ? 1u : 0u);
  }
}

TEST("of the cancels that overtake their calls the last 1,024 are remembered") {
  Pair pair(4096);
  pair.hold_calls = true;
  std::vector<CallId> calls;
  for (int i = 0; i < 1025; ++i) {
    calls.push_back(pair.client.call(pair.now, "server", "wait", {}, seconds(60), 0));
    pair.run();
  }
  CHECK_EQ(pair.held.size(), calls.size());
  for (const CallId id : calls) pair.client.cancel(pair.now, id);
  pair.run();
  for (const Write& call : pair.held) pair.transmit(pair.server, call);
  pair.run();
  CHECK(pair.server_lost.empty());
  CHECK(pair.running.size() == 1 && pair.running.front().id == calls.front());
}

TEST("arguments of many empty parts are no cheaper than others") {
  Pair pair;
  for (int i = 0; i < 9; ++i) {
    wire::Payload arguments;
    arguments.parts.resize(2000);
    pair.client.call(pair.now, "server", "wait", std::move(arguments), seconds(60), 0);
    pair.run();
  }
  CHECK(pair.server_lost.empty() && pair.errors.empty());
  CHECK(pair.running.size() >= 2 && pair.running.size() <= 4);  // half a megabyte each
}

TEST("a peer that makes up addresses of another has a few of them dialled") {
  Pair pair;
  pair.server.call(pair.now, "nobody", "f", {}, seconds(60), 0);
  for (int i = 0; i < 100; ++i) {
    DirectoryMessage message;
    message.found = Found{"nobody", {3, 30}, {}, {}};
    for (int k = 0; k < 64; ++k) {
      message.found->addresses.push_back("tcp://10.1." + std::to_string(i) + "." +
                                         std::to_string(k) + ":1");
    }
    pair.client.send_service_to(pair.now, {1, 10}, "server", Service::directory,
                                {wire::encode(message), {}});
    pair.pass(milliseconds(10));
  }
  pair.pass(seconds(10));
  CHECK(pair.server_lost.empty());
  CHECK(pair.dialled_in_vain >= 64 && pair.dialled_in_vain <= 256);
}

TEST("a peer that asks about very many names stays connected") {
  Pair pair;
  for (std::size_t i = 0; i < 70000; ++i) {
    const NamesakesMessage message{"name " + std::to_string(i), true, {}};
    pair.client.send_service_to(pair.now, {1, 10}, "server", Service::namesakes,
                                {wire::encode(message), {}});
    if (i % 1000 == 0) pair.pass(milliseconds(10));
  }
  pair.pass(milliseconds(50));
  CHECK(pair.server_lost.empty());
  CHECK_EQ(pair.server.peers(pair.now).size(), 1u);
}

TEST("a service message that there is no memory for loses the session, not the message alone") {
  Pair pair;
  pair.server_memory.most = 100000;
  const auto say = [&](std::size_t bytes) {
    wire::Payload payload;
    payload.parts.push_back(pair.client_memory.allocate(bytes));
    CHECK_EQ(pair.client.peers(pair.now).size(), 1u);
    pair.client.send_service_to(pair.now, {1, 10}, "server", Service::collective,
                                std::move(payload));
  };
  say(90000);
  pair.pass(milliseconds(50));
  CHECK(pair.server_lost.empty());
  say(1000000);
  pair.pass(milliseconds(50));
  CHECK_EQ(pair.server_lost, std::string("client"));  // the layers above hear of it
  pair.pass(seconds(2));
  CHECK_EQ(pair.server.peers(pair.now).size(), 1u);  // and it comes back
}

TEST("unauthenticated peers that fail thousands of times do not fill the log") {
  LogLimit limit;
  const Time now{seconds(100)};
  int lines = 0;
  for (int i = 0; i < 1000; ++i) lines += limit.line(now, "closed") ? 1 : 0;
  CHECK_EQ(lines, 16);
  CHECK(!limit.line(now + milliseconds(999), "closed"));
  const auto line = limit.line(now + seconds(1), "closed");
  CHECK(line && line->find("(985 connections before") != std::string::npos);
  CHECK(!limit.line(now + seconds(1), "closed"));
  CHECK_EQ(*limit.line(now + seconds(60), "closed"),
           "closed (1 connections before it are not logged)");
}

}  // namespace
}  // namespace moolink::rpc
