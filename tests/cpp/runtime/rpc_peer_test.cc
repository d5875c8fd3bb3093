#include "runtime/peer/rpc_peer.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <latch>
#include <thread>
#include <vector>

#include "check.h"
#include "wire/archive.h"

namespace moolink::runtime {
namespace rpc_peer_test {

constexpr Duration kCallTimeout = seconds(30);

wire::Payload payload_of(std::uint64_t number, std::size_t part_bytes = 0) {
  HeapAllocator heap;
  const MutableBuffer body = heap.allocate(sizeof number);
  std::memcpy(body.data(), &number, sizeof number);
  wire::Payload payload{body, {}};
  if (part_bytes > 0) {
    const MutableBuffer part = heap.allocate(part_bytes);
    std::memset(part.data(), static_cast<int>(number % 251), part_bytes);
    payload.parts.push_back(part);
  }
  return payload;
}

std::uint64_t number_in(const wire::Payload& payload) {
  std::uint64_t number = 0;
  std::memcpy(&number, payload.body.data(), sizeof number);
  return number;
}

std::shared_ptr<RpcPeer> make_peer(const std::shared_ptr<Context>& context, std::string name,
                                   std::vector<wire::PathKind> transports) {
  RpcOptions options;
  options.name = std::move(name);
  options.transports = std::move(transports);
  return RpcPeer::create(context, std::move(options));
}

// A server with an echo, and a client, each with its own context, as in two processes.
struct Pair {
  explicit Pair(std::vector<wire::PathKind> transports)
      : server(make_peer(server_context, "server", transports)),
        client(make_peer(client_context, "client", transports)) {
    server->define("echo", [](const Incoming& call) { call.responder->send(call.arguments); });
    client->connect(server->listen("127.0.0.1:0").at(0));
  }
  ~Pair() {
    client->close();
    server->close();
    client_context->stop();
    server_context->stop();
  }

  std::shared_ptr<Future> call(const std::string& function, std::uint64_t number,
                               std::size_t part_bytes = 0, std::uint16_t lane = 1) {
    return client->call("server", function, payload_of(number, part_bytes), kCallTimeout, lane);
  }

  std::shared_ptr<Context> server_context = Context::create({});
  std::shared_ptr<Context> client_context = Context::create({});
  std::shared_ptr<RpcPeer> server;
  std::shared_ptr<RpcPeer> client;
};

const std::vector<std::vector<wire::PathKind>>& all_transports() {
  static const std::vector<std::vector<wire::PathKind>> kinds = {
      {wire::PathKind::tcp}, {wire::PathKind::shm, wire::PathKind::tcp}};
  return kinds;
}

bool answers(const std::shared_ptr<Future>& future, std::uint64_t number, std::size_t part_bytes) {
  if (!future->wait(io::now() + kCallTimeout, {})) return false;
  const auto* payload = std::get_if<wire::Payload>(&future->outcome());
  if (payload == nullptr || number_in(*payload) != number) return false;
  if (part_bytes == 0) return payload->parts.empty();
  const Buffer& part = payload->parts.at(0);
  const auto expected = static_cast<std::byte>(number % 251);
  return part.size() == part_bytes && part.data()[0] == expected &&
         part.data()[part_bytes - 1] == expected;
}

TEST("threads call with payloads of all sizes") {
  for (const auto& transports : all_transports()) {
    Pair pair(transports);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (std::uint16_t t = 1; t <= 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::uint64_t i = 0; i < 60; ++i) {
          const std::size_t sizes[] = {0, 100, 70000, 3000000};
          const std::size_t size = sizes[i % 4];
          if (!answers(pair.call("echo", i, size, t), i, size)) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(pair.client->stats().calls_succeeded, 240u);
  }
}

TEST("a call that may not wait for the engine's lock is left to its caller") {
  Pair pair({wire::PathKind::tcp});
  wire::Payload payload = payload_of(5, 0);
  const auto at_once = [&] {
    return pair.client->call_at_once("server", "echo", payload, kCallTimeout, 1);
  };
  {
    const Engine::Lock held = pair.server_context->lock();  // another context's does not matter
    const Engine::Lock lock = pair.client_context->lock();
    std::thread([&] { CHECK(at_once() == nullptr); }).join();
  }
  CHECK_EQ(number_in(payload), 5U);
  std::shared_ptr<Future> future;
  while (future == nullptr) future = at_once();  // the reactor may have the lock
  CHECK(answers(future, 5, 0));
}

TEST("a reply dropped unsent is an error at once") {
  Pair pair({wire::PathKind::tcp});
  pair.server->define("drop", [](const Incoming&) {});
  const auto future = pair.call("drop", 1);
  CHECK(future->wait(io::now() + kCallTimeout, {}));
  CHECK(std::get<Error>(future->outcome()).code == ErrorCode::remote);
}

TEST("cancel completes the future and tells the handler") {
  Pair pair({wire::PathKind::tcp});
  std::shared_ptr<Responder> kept;
  std::latch called(1);
  pair.server->define("keep", [&](const Incoming& call) {
    kept = call.responder;
    called.count_down();
  });
  const auto future = pair.call("keep", 1);
  called.wait();
  future->cancel();
  CHECK(future->done());
  CHECK(std::get<Error>(future->outcome()).code == ErrorCode::cancelled);
  while (!kept->cancelled()) std::this_thread::yield();
  kept->send(payload_of(1));
  kept.reset();
  CHECK(answers(pair.call("echo", 5), 5, 0));
}

TEST("what is to be done on cancel is done once, or forgotten with the reply") {
  Pair pair({wire::PathKind::tcp});
  std::vector<std::shared_ptr<Responder>> kept(2);
  std::latch called(2);
  pair.server->define("keep", [&](const Incoming& call) {
    kept.at(number_in(call.arguments)) = call.responder;
    called.count_down();
  });
  const auto answered = pair.call("keep", 0);
  const auto cancelled = pair.call("keep", 1);
  called.wait();
  const auto owner = std::make_shared<int>(0);
  std::atomic<int> wrong{0};
  kept[0]->on_cancel([&, owner] { ++wrong; });
  kept[0]->send(payload_of(0));
  CHECK(answers(answered, 0, 0));
  CHECK_EQ(owner.use_count(), 1);
  kept[0]->on_cancel([&, owner] { ++wrong; });
  CHECK_EQ(owner.use_count(), 1);
  std::latch told(3);
  for (int i = 0; i < 2; ++i) kept[1]->on_cancel([&] { told.count_down(); });
  cancelled->cancel();
  while (!kept[1]->cancelled()) std::this_thread::yield();
  kept[1]->on_cancel([&] { told.count_down(); });
  told.wait();
  CHECK_EQ(wrong.load(), 0);
}

// Sends the numbers below `count`, as far as the caller takes them, and then a reply.
struct Counting : std::enable_shared_from_this<Counting> {
  std::shared_ptr<Responder> responder;
  std::uint64_t count = 0;
  std::uint64_t next = 0;

  void run() {
    while (!responder->cancelled() && next < count) {
      if (!responder->has_room()) {
        responder->when_room([self = shared_from_this()] { self->run(); });
        return;
      }
      responder->send_item(payload_of(next++));
    }
    responder->send(payload_of(count));
  }
};

TEST("threads take streams, to the end or not, from a peer and from their own") {
  for (const auto& transports : all_transports()) {
    Pair pair(transports);
    std::atomic<int> alive{0};
    const auto count = [&](const Incoming& call) {
      ++alive;
      const std::shared_ptr<Counting> counting(new Counting, [&](Counting* ended) {
        delete ended;
        --alive;
      });
      counting->responder = call.responder;
      counting->count = number_in(call.arguments);
      counting->run();
    };
    pair.server->define("count", count);
    pair.client->define("count", count);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (std::uint64_t round = 0; round < 60; ++round) {
          const auto stream =
              pair.client->stream(round % 2 == 0 ? "server" : "client", "count", payload_of(round),
                                  kCallTimeout, static_cast<std::uint16_t>(1 + thread), 4);
          const std::uint64_t leave_at = round % 3 == 0 ? round / 2 : round;
          std::uint64_t taken = 0;
          while (taken < leave_at) {
            if (const auto item = stream->take()) {
              wrong += number_in(*item) != taken++;
            } else if (stream->ended() || !stream->wait(io::now() + kCallTimeout, {})) {
              ++wrong;
              break;
            }
          }
          if (leave_at < round) stream->cancel();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
    const Time limit = io::now() + kCallTimeout;
    while (alive > 0 && io::now() < limit) std::this_thread::yield();
    CHECK_EQ(alive.load(), 0);  // nothing is parked for ever
  }
}

TEST("callbacks run once, before or after the end") {
  Pair pair({wire::PathKind::tcp});
  std::latch ran(2);
  const auto future = pair.call("echo", 1);
  future->then([&] { ran.count_down(); });
  CHECK(answers(future, 1, 0));
  future->then([&] { ran.count_down(); });
  ran.wait();
}

TEST("services and observers of peers") {
  struct Observer : PeerObserver {
    std::atomic<int> up{0}, down{0};
    Uid instance;
    void peer_up(const rpc::PeerUp& peer) override {
      instance = peer.instance;
      ++up;
    }
    void peer_down(const rpc::PeerDown&) override { ++down; }
  } observer;
  Pair pair({wire::PathKind::tcp});
  std::vector<std::uint64_t> got;
  std::latch all(100);
  std::shared_ptr<void> routed;
  {
    const Engine::Lock server_lock = pair.server_context->lock();
    routed = pair.server->router().route(rpc::Service::snapshot, "scope", "",
                                         [&](const Uid& from, const wire::Payload& payload) {
                                           CHECK(from == pair.client->instance());
                                           got.push_back(number_in({payload.parts.at(0), {}}));
                                           all.count_down();
                                         });
  }
  Listed<PeerObserver> observes;
  {
    const Engine::Lock lock = pair.client_context->lock();
    observes = pair.client->add(observer);
  }
  CHECK(answers(pair.call("echo", 1), 1, 0));
  {
    const Engine::Lock lock = pair.client_context->lock();
    for (std::uint64_t i = 0; i < 100; ++i) {
      wire::Writer scope;
      scope(std::string("scope"));
      pair.client->send_service_to({}, "server", rpc::Service::snapshot,
                                   {scope.take(), {payload_of(i).body}});
    }
    pair.client->flush();
  }
  all.wait();
  for (std::uint64_t i = 0; i < 100; ++i) CHECK_EQ(got[i], i);
  pair.server->close();
  while (observer.down == 0) std::this_thread::yield();
  const Engine::Lock server_lock = pair.server_context->lock();
  routed.reset();
  const Engine::Lock lock = pair.client_context->lock();
  observes.reset();
}

TEST("closing while threads call") {
  Pair pair({wire::PathKind::tcp});
  std::atomic<bool> closed{false};
  std::vector<std::thread> threads;
  for (std::uint16_t t = 1; t <= 3; ++t) {
    threads.emplace_back([&, t] {
      try {
        for (std::uint64_t i = 0;; ++i) {
          pair.call("echo", i, 0, t)->wait(io::now() + kCallTimeout, {});
        }
      } catch (const Exception& e) {
        if (e.error().code == ErrorCode::closed) closed = true;
      }
    });
  }
  CHECK(answers(pair.call("echo", 1), 1, 0));
  pair.client->close();
  for (std::thread& thread : threads) thread.join();
  CHECK(closed);
}

TEST("a forked child says so and the parent goes on") {
  Pair pair({wire::PathKind::tcp});
  CHECK(answers(pair.call("echo", 1), 1, 0));
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      pair.call("echo", 2);
    } catch (const Exception& e) {
      status = e.error().code == ErrorCode::closed ? 0 : 2;
    }
    pair.client->close();
    _exit(status);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(answers(pair.call("echo", 3), 3, 0));
}

}  // namespace rpc_peer_test
}  // namespace moolink::runtime
