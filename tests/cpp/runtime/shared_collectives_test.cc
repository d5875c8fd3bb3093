#include "runtime/shared_memory/shared_collectives.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "io/loop.h"
#include "wire/archive.h"

namespace moolink::runtime {
namespace shared_collectives_test {

constexpr std::uint64_t kElements = 700000;  // several pieces of several slices
constexpr std::size_t kBytes = kElements * sizeof(float);

// One member, with its own context as in a process of its own.
class Member final : public Driven {
 public:
  Member(const std::string& name, std::vector<wire::PathKind> transports) {
    RpcOptions options;
    options.name = name;
    options.transports = std::move(transports);
    rpc = RpcPeer::create(context, std::move(options));
    const Engine::Lock lock = context->lock();
    shared = std::make_shared<SharedCollectives>(
        rpc, "test", "", "tests", rpc::Service::collective,
        SharedCollectives::Events{[this](std::uint64_t epoch) { tell([&] { ready = epoch; }); },
                                  [this](std::uint64_t s) { tell([&] { ended.insert(s); }); },
                                  [](const collective::SharedPipeline::Sum&) {},
                                  [this](const Error& error) { tell([&] { broken = error; }); }});
    driven = context->engine().add(*this);
  }
  ~Member() override {
    {
      const Engine::Lock lock = context->lock();
      shared->close();
      driven.reset();
    }
    rpc->close();
    context->stop();
  }

  void tick(Time now) override { shared->tick(now); }
  Time next_deadline() const override { return shared->next_deadline(); }

  void enter(const std::vector<Member*>& members, std::uint64_t epoch) {
    SharedCollectives::Members entered;
    entered.epoch = epoch;
    entered.one_host = true;
    for (const Member* member : members) {
      entered.instances.push_back(member->rpc->instance());
      entered.names.push_back(member->rpc->name());
    }
    const Engine::Lock lock = context->lock();
    shared->leave();
    ended.clear();
    shared->enter(io::now(), entered);
    rpc->flush();
    context->engine().rearm(next_deadline());
  }
  // Operation `s` of `ranks`; returns its output.
  MutableBuffer reduce(std::uint64_t s, std::uint32_t ranks, std::vector<Buffer> inputs) {
    collective::PipelineOperation operation;
    operation.s = s;
    operation.passage = {collective::Kind::all_reduce, 0, ranks, sizeof(float), kElements};
    operation.dtype = tensor::DType::float32;
    operation.divisor = 2;
    operation.inputs = std::move(inputs);
    operation.output = HeapAllocator().allocate(kBytes);
    const MutableBuffer output = operation.output;
    const Engine::Lock lock = context->lock();
    shared->start(std::move(operation));
    return output;
  }
  bool wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, seconds(30), condition);
  }

  std::shared_ptr<Context> context = Context::create({});
  std::shared_ptr<RpcPeer> rpc;
  std::shared_ptr<SharedCollectives> shared;
  Listed<Driven> driven;
  std::mutex mutex;  // of what the events tell
  std::condition_variable changed;
  std::uint64_t ready = 0;
  std::set<std::uint64_t> ended;
  Error broken;

 private:
  template <class Change>
  void tell(const Change& change) {
    const std::lock_guard guard(mutex);
    change();
    changed.notify_all();
  }
};

Buffer filled(float value) {
  const MutableBuffer buffer = HeapAllocator().allocate(kBytes);
  auto* elements = reinterpret_cast<float*>(buffer.data());
  for (std::uint64_t i = 0; i < kElements; ++i) elements[i] = value + static_cast<float>(i % 7);
  return buffer;
}

// Whether every element is scale * (i % 7) + offset.
bool is_line(const Buffer& result, float scale, float offset) {
  if (result.size() != kBytes) return false;
  const auto* elements = reinterpret_cast<const float*>(result.data());
  for (std::uint64_t i = 0; i < kElements; ++i) {
    if (elements[i] != scale * static_cast<float>(i % 7) + offset) return false;
  }
  return true;
}

TEST("shared collectives: two peers attach, reduce many times, and move to another epoch") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  for (const std::uint64_t epoch : {3, 4}) {
    a.enter({&a, &b}, epoch);
    b.enter({&a, &b}, epoch);
    CHECK(a.wait([&] { return a.ready == epoch; }));
    CHECK(b.wait([&] { return b.ready == epoch; }));
    std::vector<MutableBuffer> results;
    for (std::uint64_t s = 1; s <= 6; ++s) {
      const auto value = static_cast<float>(s * epoch);
      // b contributes twice to each.
      results.push_back(a.reduce(s, 2, {filled(value)}));
      results.push_back(b.reduce(s, 2, {filled(2 * value), filled(1)}));
    }
    for (Member* member : {&a, &b}) {
      CHECK(member->wait([&] { return member->ended.contains(6); }));
      CHECK(!member->broken);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto value = static_cast<float>((i / 2 + 1) * epoch);
      CHECK(is_line(results[i], 1.5F, (3 * value + 1) / 2));
    }
  }
}

TEST("shared collectives: three peers reduce a slice each") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  Member c("c", {wire::PathKind::shm, wire::PathKind::tcp});
  const std::string address = a.rpc->listen("127.0.0.1:0").at(0);
  const std::vector<Member*> members{&a, &b, &c};
  b.rpc->connect(address);
  c.rpc->connect(address);
  for (Member* member : members) member->enter(members, 3);
  for (Member* member : members) CHECK(member->wait([&] { return member->ready == 3; }));
  std::vector<MutableBuffer> results;
  for (std::uint64_t s = 1; s <= 6; ++s) {
    float value = 1;
    for (Member* member : members) {
      results.push_back(member->reduce(s, 3, {filled(value)}));
      value += static_cast<float>(s);
    }
  }
  for (Member* member : members) CHECK(member->wait([&] { return member->ended.contains(6); }));
  for (std::size_t i = 0; i < results.size(); ++i) {
    CHECK(is_line(results[i], 1.5F, (3 + 3 * static_cast<float>(i / 3 + 1)) / 2));
  }
}

// Ends every connection through shared memory of this process, as a failing system would.
void cut_sockets() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(entry.path().filename().string());
    sockaddr_un address{};
    socklen_t size = sizeof address;
    if (::getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
        address.sun_family == AF_UNIX && size > sizeof address.sun_family) {
      ::shutdown(descriptor, SHUT_RDWR);  // the dialler's end: only its peer has a name
    }
  }
}

TEST("shared collectives: memory is lent once it is mapped, beyond the end of the connection") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  a.rpc->define("none", [](const Incoming& call) { call.responder->send({}); });
  for (Member* member : {&a, &b}) member->enter({&a, &b}, 3);
  for (Member* member : {&a, &b}) CHECK(member->wait([&] { return member->ready == 3; }));
  const MutableBuffer memory = b.context->lending().allocate(kBytes);
  const std::uint64_t segment = b.context->lending().find(memory.data(), kBytes)->segment;
  const auto write = [&](float value) {
    std::memcpy(memory.data(), filled(value).data(), memory.size());
  };
  const auto lends = [&] {
    const Engine::Lock lock = b.context->lock();
    return b.rpc->lends(a.rpc->instance(), "a", segment, "test");
  };
  const auto is_there = [&] {
    const Engine::Lock lock = a.context->lock();
    return a.rpc->lent_by(b.rpc->instance(), segment) != nullptr;
  };
  const auto call_until = [&](const std::function<bool()>& condition) {
    const Time until = io::now() + seconds(30);
    while (!condition() && io::now() < until) {
      b.rpc->call("a", "none", {}, seconds(30), 1)->wait(until, {});
    }
    return condition();
  };
  {
    // a cannot answer: the operation passes through windows, which are read when b begins it.
    const Engine::Lock lock = a.context->lock();
    CHECK(!lends());
  }
  CHECK(call_until(lends));
  CHECK(is_there());
  for (const std::uint64_t s : {1, 2}) {
    write(1);
    const MutableBuffer second = b.reduce(s, 2, {memory});
    // b has put nothing into its window: a reads the memory of b as it is when a begins, also when
    // the connection has ended before that.
    {
      const Engine::Lock lock = b.context->lock();
      write(4);
    }
    if (s == 2) {
      cut_sockets();
      CHECK(call_until([&] { return !is_there(); }));
    }
    const MutableBuffer first = a.reduce(s, 2, {filled(1)});
    for (Member* member : {&a, &b}) {
      CHECK(member->wait([&] { return member->ended.contains(s); }));
      CHECK(!member->broken);
    }
    CHECK(is_line(first, 1, 2.5F) && is_line(second, 1, 2.5F));
  }
  CHECK(call_until(lends));  // through the next connection
}

TEST("shared collectives: what a peer outside the group lent is unmapped with its connection") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  const std::string address = a.rpc->listen("127.0.0.1:0").at(0);
  b.rpc->connect(address);
  a.rpc->define("none", [](const Incoming& call) { call.responder->send({}); });
  for (Member* member : {&a, &b}) member->enter({&a, &b}, 3);
  for (Member* member : {&a, &b}) CHECK(member->wait([&] { return member->ready == 3; }));
  const auto call_until = [](Member& caller, const std::function<bool()>& condition) {
    const Time until = io::now() + seconds(30);
    while (!condition() && io::now() < until) {
      caller.rpc->call("a", "none", {}, seconds(30), 1)->wait(until, {});
    }
    return condition();
  };
  LentBytes::weak_type lent;
  {
    Member guest("guest", {wire::PathKind::shm, wire::PathKind::tcp});
    guest.rpc->connect(address);
    const MutableBuffer memory = guest.context->lending().allocate(kBytes);
    const std::uint64_t segment = guest.context->lending().find(memory.data(), kBytes)->segment;
    const auto lends = [&] {
      const Engine::Lock lock = guest.context->lock();
      return guest.rpc->lends(a.rpc->instance(), "a", segment, "test");
    };
    CHECK(call_until(guest, lends));
    const Engine::Lock lock = a.context->lock();
    lent = a.rpc->lent_by(guest.rpc->instance(), segment);
    CHECK(!lent.expired());
  }
  CHECK(call_until(b, [&] { return lent.expired(); }));
}

TEST("shared collectives: a member that enters late finds the offer that came early") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  a.enter({&a, &b}, 7);
  // Once this call has come back, so has what a sent before.
  b.rpc->define("none", [](const Incoming& call) { call.responder->send({}); });
  CHECK(a.rpc->call("b", "none", {}, seconds(30), 1)->wait(io::now() + seconds(30), {}));
  b.enter({&a, &b}, 7);
  CHECK(b.wait([&] { return b.ready == 7; }));
}

TEST("shared collectives: an offer of the zero key leaves nothing behind") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  for (Member* member : {&a, &b}) member->enter({&a, &b}, 3);
  CHECK(a.wait([&] { return a.ready == 3; }) && b.wait([&] { return b.ready == 3; }));
  b.enter({&a, &b}, 5);
  const auto send = [&](const wire::Payload& payload) {
    const Engine::Lock lock = a.context->lock();
    a.rpc->send_service_to(b.rpc->instance(), "b", rpc::Service::collective, payload, "test");
    a.rpc->flush();
  };
  constexpr std::uint8_t kOffer = 0;
  wire::Writer offer;
  offer(std::string(), kOffer, std::uint64_t{5}, Uid{});
  send({offer.take(), {}});
  b.rpc->define("none", [](const Incoming& call) { call.responder->send({}); });
  CHECK(a.rpc->call("b", "none", {}, seconds(30), 1)->wait(io::now() + seconds(30), {}));

  constexpr Uid kLater{1, 2};
  bool later = false;
  {
    const Engine::Lock lock = b.context->lock();
    b.shared->close();
    b.rpc->descriptors().expect(kLater, [&](const std::vector<Descriptor>&) {
      const std::lock_guard guard(b.mutex);
      later = true;
      b.changed.notify_all();
    });
  }
  const Descriptor some(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  {
    const Engine::Lock lock = a.context->lock();
    for (const Uid& key : {Uid{}, kLater}) {
      const int descriptor = some.get();
      CHECK(a.rpc->share(b.rpc->instance(), key, {&descriptor, 1}));
    }
  }
  CHECK(b.wait([&] { return later; }));
  bool unclaimed = false;
  const Engine::Lock lock = b.context->lock();
  b.rpc->descriptors().expect(Uid{}, [&](const std::vector<Descriptor>&) { unclaimed = true; });
  CHECK(unclaimed);
}

TEST("shared collectives: without shared memory nobody is ready, and no operation starts") {
  Member a("a", {wire::PathKind::tcp});
  Member b("b", {wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  a.enter({&a, &b}, 3);
  b.enter({&a, &b}, 3);
  CHECK_THROWS(b.reduce(1, 2, {filled(1)}), ErrorCode::error);
  CHECK_EQ(a.ready, 0u);
  CHECK_EQ(b.ready, 0u);
}

}  // namespace shared_collectives_test
}  // namespace moolink::runtime
