#include "runtime/shared_memory/shared_rounds.h"

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "io/loop.h"

namespace moolink::runtime {
namespace shared_rounds_test {

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
    rounds = SharedRounds::create(rpc, "test", "", {{tensor::DType::float32, 0, kElements}}, kBytes,
                                  {[this](std::uint64_t epoch) { tell([&] { ready = epoch; }); },
                                   [this](std::uint64_t, std::uint64_t round, Buffer result) {
                                     tell([&] { results[round] = std::move(result); });
                                   },
                                   [this](std::uint64_t, std::uint64_t round, const Error& error) {
                                     tell([&] { errors[round] = error; });
                                   }});
    context->engine().add(*this);
  }
  ~Member() override {
    {
      const Engine::Lock lock = context->lock();
      rounds->close();
      context->engine().remove(*this);
    }
    rpc->close();
    context->stop();
  }

  void tick(Time now) override { rounds->tick(now); }
  Time next_deadline() const override { return rounds->next_deadline(); }

  void enter(const std::vector<Member*>& members, std::uint64_t epoch) {
    SharedRounds::Members entered;
    entered.epoch = epoch;
    entered.one_host = true;
    for (const Member* member : members) {
      entered.instances.push_back(member->rpc->instance());
      entered.names.push_back(member->rpc->name());
    }
    const Engine::Lock lock = context->lock();
    rounds->enter(io::now(), std::move(entered));
    rpc->flush();
    context->engine().rearm(next_deadline());
  }
  void reduce(SharedRounds::Round round) {
    const Engine::Lock lock = context->lock();
    rounds->reduce(std::move(round));
  }
  bool wait(const std::function<bool()>& condition) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, seconds(30), condition);
  }

  std::shared_ptr<Context> context = Context::create({});
  std::shared_ptr<RpcPeer> rpc;
  std::shared_ptr<SharedRounds> rounds;
  std::mutex mutex;  // of what the events tell
  std::condition_variable changed;
  std::uint64_t ready = 0;
  std::map<std::uint64_t, Buffer> results;
  std::map<std::uint64_t, Error> errors;

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

SharedRounds::Round make_round(std::uint64_t epoch, std::uint64_t s, std::uint64_t round,
                               std::vector<Buffer> inputs) {
  return {epoch, s, round, 2, std::move(inputs), {0, 1}, {0, 1}};
}

TEST("shared rounds: two peers attach, reduce many rounds, and move to another epoch") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  std::uint64_t round = 0;
  for (const std::uint64_t epoch : {3, 4}) {
    a.enter({&a, &b}, epoch);
    b.enter({&a, &b}, epoch);
    CHECK(a.wait([&] { return a.ready == epoch; }));
    CHECK(b.wait([&] { return b.ready == epoch; }));
    for (std::uint64_t s = 1; s <= 6; ++s) {
      ++round;
      const auto value = static_cast<float>(round);
      // b contributes twice to each round.
      a.reduce(make_round(epoch, s, round, {filled(value)}));
      b.reduce(make_round(epoch, s, round, {filled(2 * value), filled(1)}));
    }
    for (Member* member : {&a, &b}) {
      CHECK(member->wait([&] { return member->results.size() == round; }));
      for (std::uint64_t r = round - 5; r <= round; ++r) {
        CHECK(is_line(member->results[r], 1.5F, (3 * static_cast<float>(r) + 1) / 2));
      }
      CHECK(member->errors.empty());
    }
  }
}

TEST("shared rounds: three peers reduce a slice each") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  Member c("c", {wire::PathKind::shm, wire::PathKind::tcp});
  const std::string address = a.rpc->listen("127.0.0.1:0").at(0);
  const std::vector<Member*> members{&a, &b, &c};
  b.rpc->connect(address);
  c.rpc->connect(address);
  for (Member* member : members) member->enter(members, 3);
  for (Member* member : members) CHECK(member->wait([&] { return member->ready == 3; }));
  for (std::uint64_t s = 1; s <= 6; ++s) {
    float value = 1;
    for (Member* member : members) {
      member->reduce({3, s, s, 2, {filled(value)}, {0, 1, 2}, {0, 1, 2}});
      value += static_cast<float>(s);
    }
  }
  for (Member* member : members) {
    CHECK(member->wait([&] { return member->results.size() == 6; }));
    for (std::uint64_t r = 1; r <= 6; ++r) {
      CHECK(is_line(member->results[r], 1.5F, (3 + 3 * static_cast<float>(r)) / 2));
    }
  }
}

TEST("shared rounds: memory of the segment is given out, reduced where it lies, and comes back") {
  Member a("a", {wire::PathKind::shm, wire::PathKind::tcp});
  Member b("b", {wire::PathKind::shm, wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  const auto input_of = [](Member& member) {
    const Engine::Lock lock = member.context->lock();
    return member.rounds->input();
  };
  CHECK(input_of(a).empty());  // no segment yet
  MutableBuffer outlives;
  for (const std::uint64_t epoch : {3, 4}) {
    a.enter({&a, &b}, epoch);
    b.enter({&a, &b}, epoch);
    CHECK(a.wait([&] { return a.ready == epoch; }));
    CHECK(b.wait([&] { return b.ready == epoch; }));
    MutableBuffer input = input_of(a);
    CHECK_EQ(input.size(), kBytes);
    std::memcpy(input.data(), filled(5).data(), kBytes);
    // Beside it one of the heap, and in the second epoch one of a segment that is given up.
    std::vector<Buffer> inputs{input, filled(1)};
    if (epoch == 4) inputs[1] = outlives;
    a.reduce({epoch, 1, epoch, 2, inputs, {0, 1}, {0, 1}});
    b.reduce({epoch, 1, epoch, 2, {filled(2)}, {0, 1}, {0, 1}});
    for (Member* member : {&a, &b}) {
      CHECK(member->wait([&] { return member->results.contains(epoch); }));
      CHECK(is_line(member->results[epoch], 1.5F, epoch == 3 ? 4 : 6));
    }
    outlives = input;
    CHECK(is_line(outlives, 1, 5));  // nobody writes it while it is held
    const MutableBuffer second = input_of(a);
    const MutableBuffer third = input_of(a);
    CHECK(!second.empty() && !third.empty());
    CHECK(input_of(a).empty());
  }
}

TEST("shared rounds: a member that enters late finds the offer that came early") {
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

TEST("shared rounds: without shared memory nobody is ready, and a round is refused") {
  Member a("a", {wire::PathKind::tcp});
  Member b("b", {wire::PathKind::tcp});
  b.rpc->connect(a.rpc->listen("127.0.0.1:0").at(0));
  a.enter({&a, &b}, 3);
  b.enter({&a, &b}, 3);
  b.reduce(make_round(3, 1, 1, {filled(1)}));
  CHECK(b.wait([&] { return b.errors.contains(1); }));
  CHECK_EQ(a.ready, 0u);
  CHECK_EQ(b.ready, 0u);
}

}  // namespace shared_rounds_test
}  // namespace moolink::runtime
