#include "runtime/group/operation_runner.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
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
namespace operation_runner_test {

constexpr std::int64_t kElements = 700000;  // several pieces of several slices
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
    runner = std::make_shared<OperationRunner>(
        rpc, "test", "test", OperationRunner::Segment{"", "tests", rpc::Service::collective},
        OperationRunner::Events{{},
                                [this](const collective::Engine::Done& done) {
                                  tell([&] { ended.insert(numbers.at(done.op)); });
                                },
                                [this](const Error& error) { tell([&] { broken = error; }); },
                                [this](std::uint64_t epoch) { tell([&] { ready = epoch; }); },
                                [this](const Error& error) { tell([&] { broken = error; }); }});
    driven = context->engine().add(*this);
  }
  ~Member() override {
    {
      const Engine::Lock lock = context->lock();
      runner->close();
      driven.reset();
    }
    rpc->close();
    context->stop();
  }

  void tick(Time now) override { runner->tick(now); }
  Time next_deadline() const override { return runner->next_deadline(); }

  void enter(const std::vector<Member*>& members, std::uint64_t epoch) {
    std::vector<collective::EpochMembers::Member> entered;
    for (const Member* member : members) {
      entered.push_back({member->rpc->instance(), member->rpc->name(), context->host_key()});
    }
    const Engine::Lock lock = context->lock();
    ended.clear();
    runner->enter(io::now(), std::make_shared<const collective::EpochMembers>(epoch, entered), {});
    rpc->flush();
    context->engine().rearm(next_deadline());
  }
  // Operation `s` of the epoch; returns its output.
  MutableBuffer reduce(std::uint64_t s, std::vector<Buffer> inputs) {
    collective::OpSpec spec;
    spec.divisor = 2;
    spec.shape = {kElements};
    const MutableBuffer output = HeapAllocator().allocate(kBytes);
    collective::Engine::Options options;
    options.output = output;
    options.shared = s;
    const Engine::Lock lock = context->lock();
    const auto op = runner->engine().start("test", spec, std::move(inputs), std::move(options));
    numbers[op] = s;
    runner->carry_out();
    return output;
  }
  bool wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, seconds(30), condition);
  }

  std::shared_ptr<Context> context = Context::create({});
  std::shared_ptr<RpcPeer> rpc;
  std::shared_ptr<OperationRunner> runner;
  Listed<Driven> driven;
  std::mutex mutex;  // of what the events tell
  std::condition_variable changed;
  std::uint64_t ready = 0;
  std::map<collective::OpId, std::uint64_t> numbers;  // with the lock of the engine
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
  for (std::int64_t i = 0; i < kElements; ++i) elements[i] = value + static_cast<float>(i % 7);
  return buffer;
}

// Whether every element is scale * (i % 7) + offset.
bool is_line(const Buffer& result, float scale, float offset) {
  if (result.size() != kBytes) return false;
  const auto* elements = reinterpret_cast<const float*>(result.data());
  for (std::int64_t i = 0; i < kElements; ++i) {
    if (elements[i] != scale * static_cast<float>(i % 7) + offset) return false;
  }
  return true;
}

TEST("operations in a segment: two peers attach, reduce many times, and move to another epoch") {
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
      results.push_back(a.reduce(s, {filled(value)}));
      results.push_back(b.reduce(s, {filled(2 * value), filled(1)}));
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

TEST("operations in a segment: three peers reduce a slice each") {
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
      results.push_back(member->reduce(s, {filled(value)}));
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

TEST("operations in a segment: memory is lent once it is mapped, also after the connection ends") {
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
    const MutableBuffer second = b.reduce(s, {memory});
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
    const MutableBuffer first = a.reduce(s, {filled(1)});
    for (Member* member : {&a, &b}) {
      CHECK(member->wait([&] { return member->ended.contains(s); }));
      CHECK(!member->broken);
    }
    CHECK(is_line(first, 1, 2.5F) && is_line(second, 1, 2.5F));
  }
  CHECK(call_until(lends));  // through the next connection
}

TEST(
    "operations in a segment: memory of a peer outside the group is unmapped with its connection") {
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

TEST("operations in a segment: a member that enters late finds the offer that came early") {
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

TEST("operations in a segment: an offer of the zero key leaves no expectation") {
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
    b.runner->close();
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

TEST("operations in a segment: without shared memory no member is ready, and no operation passes") {
  Member a("a", {wire::PathKind::tcp});
  Member b("b", {wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  a.enter({&a, &b}, 3);
  b.enter({&a, &b}, 3);
  b.reduce(1, {filled(1)});
  CHECK(b.broken.code == ErrorCode::error && b.ended.empty());
  CHECK_EQ(a.ready, 0u);
  CHECK_EQ(b.ready, 0u);
}

}  // namespace operation_runner_test
}  // namespace moolink::runtime
