#include "collective/engine.h"

#include <cmath>
#include <vector>

#include "collective/members.h"

namespace engine_test {

using namespace moolink;
using namespace moolink::collective;

TEST("allreduce: the same bits everywhere, for any number of members and any order of arrival") {
  Random random(3);
  for (std::size_t k = 1; k <= 7; ++k) {
    for (const std::int64_t count : {0, 1, 5, 1024, 1025, 20011}) {
      Members members(k, 10 * k + static_cast<std::uint64_t>(count));
      std::vector<std::vector<float>> inputs(k,
                                             std::vector<float>(static_cast<std::size_t>(count)));
      std::vector<Buffer> buffers;
      for (auto& input : inputs) {
        for (float& value : input) value = 1.0f / static_cast<float>(1 + random.below(1000));
        buffers.push_back(buffer(input));
      }
      std::vector<float> expected = inputs[0];
      for (std::size_t n = 1; n < k; ++n) {
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += inputs[n][i];
      }
      for (std::size_t i = 0; i < k; ++i) members.start(i, "x", floats(count), {buffers[i]});
      members.settle();
      for (std::size_t i = 0; i < k; ++i) {
        const auto* done = members.done(i, 1);
        CHECK(done != nullptr && !done->error);
        if (done == nullptr) continue;
        const std::vector<float> result = values_of<float>(done->tensor);
        CHECK(result == values_of<float>(members.done(0, 1)->tensor));
        for (std::size_t j = 0; j < result.size(); ++j) {
          CHECK(std::fabs(result[j] - expected[j]) <= 1e-6f * expected[j]);
        }
        CHECK(values_of<float>(buffers[i]) == inputs[i]);
        CHECK_EQ(members.engine(i).pending(), std::size_t{0});
      }
    }
  }
}

TEST("mean divides once; several inputs of one member are added up") {
  Members members(3);
  OpSpec mean = floats(3000, ReduceOp::mean);
  for (std::size_t i = 0; i < 3; ++i) {
    members.start(i, "mean", mean, {buffer(std::vector<float>(3000, static_cast<float>(i + 1)))});
  }
  OpSpec some = floats(3000);
  some.contributors = {1};
  some.divisor = 4;
  members.start(0, "some", some, {});
  members.start(1, "some", some,
                {buffer(std::vector<float>(3000, 1)), buffer(std::vector<float>(3000, 2)),
                 buffer(std::vector<float>(3000, 3))});
  members.start(2, "some", some, {});
  members.settle();
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(values_of<float>(members.done(i, 1)->tensor) == std::vector<float>(3000, 2));
    CHECK(values_of<float>(members.done(i, 2)->tensor) == std::vector<float>(3000, 1.5));
  }
}

TEST("operations of one name follow one another; what arrives before the start waits") {
  Members members(2);
  for (int n = 1; n <= 3; ++n) {
    members.start(0, "x", floats(1), {buffer(std::vector<float>{static_cast<float>(n)})});
  }
  members.settle();
  CHECK(members.done(0, 1) == nullptr);
  CHECK((members.engine(0).waiting_for(1) == std::vector<std::string>{"peer-1"}));
  for (int n = 1; n <= 3; ++n) {
    members.start(1, "x", floats(1), {buffer(std::vector<float>{static_cast<float>(10 * n)})});
    members.settle();
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK(values_of<float>(members.done(i, static_cast<OpId>(n))->tensor) ==
            std::vector<float>{static_cast<float>(11 * n)});
    }
  }
}

TEST("a disagreement is an error at everyone that names both peers and both specs") {
  for (const std::int64_t count : {4, 100000}) {
    Members members(3);
    members.start(0, "x", floats(count), {buffer(std::vector<float>(std::size_t(count)))});
    members.start(1, "x", floats(count), {buffer(std::vector<float>(std::size_t(count)))});
    members.start(2, "x", floats(3), {buffer(std::vector<float>(3))});
    members.settle();
    for (std::size_t i = 0; i < 3; ++i) {
      const auto* done = members.done(i, 1);
      CHECK(done != nullptr && done->error.code == ErrorCode::error);
      if (done == nullptr) continue;
      for (const char* word : {"peer-2", "(3,)", "'x'"}) {
        CHECK(done->error.message.find(word) != std::string::npos);
      }
      CHECK(done->error.message.find(std::to_string(count)) != std::string::npos);
    }
  }
}

TEST("a change of epoch fails what is unfinished, or starts it again with the same input") {
  Members members(3);
  Engine::Options retry;
  retry.retry = true;
  const auto one = buffer(std::vector<float>{1});
  for (std::size_t i = 0; i < 2; ++i) {
    members.start(i, "lost", floats(1), {one});
    members.start(i, "kept", floats(1), {one}, retry);
  }
  members.settle();
  members.enter(2, 0);  // one of them before the others: its messages of epoch 2 come early
  members.settle();
  members.enter(2, 1);
  members.enter(2, 2);
  members.start(2, "kept", floats(1), {one});
  members.settle();
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(members.done(i, 1)->error.code == ErrorCode::group_changed);
    CHECK(values_of<float>(members.done(i, 2)->tensor) == std::vector<float>{3});
  }
  CHECK(values_of<float>(members.done(2, 1)->tensor) == std::vector<float>{3});
}

// What one engine wants done of one kind.
SharedMembers members_of(std::uint64_t epoch, std::vector<EpochMembers::Member> members) {
  return std::make_shared<const EpochMembers>(epoch, std::move(members));
}

template <class Action>
std::vector<Action> take(Engine& engine) {
  std::vector<Action> taken;
  for (auto& action : engine.take_actions()) {
    if (auto* wanted = std::get_if<Action>(&action)) taken.push_back(std::move(*wanted));
  }
  return taken;
}

TEST("arithmetic of an earlier run of a retried operation is not taken for the new one's") {
  Engine engine({"group", Uid{1, 1}, nullptr});
  const auto members = [](std::uint64_t epoch) { return members_of(epoch, {{{1, 1}, "peer-0"}}); };
  Engine::Options retry;
  retry.retry = true;
  for (const bool lent : {false, true}) {  // lent inputs are copied first, by a task too
    retry.lent = lent;
    engine.set_members(members(lent ? 3 : 1), {});
    engine.start("x", floats(2), {buffer(std::vector<float>{1, 2})}, retry);
    const auto old = take<Engine::Sum>(engine);
    CHECK_EQ(old.size(), std::size_t{1});
    engine.set_members(members(lent ? 4 : 2), {});
    auto current = take<Engine::Sum>(engine);
    CHECK_EQ(current.size(), std::size_t{1});
    for (const Engine::Sum& sum : old) {
      run(sum.work);  // in its own memory
      engine.summed(sum.op, sum.run, sum.id);
    }
    CHECK(engine.take_actions().empty());
    engine.summed(current[0].op, current[0].run, 7);  // no slice of it
    for (; !current.empty(); current = take<Engine::Sum>(engine)) {
      for (const Engine::Sum& sum : current) {
        run(sum.work);
        engine.summed(sum.op, sum.run, sum.id);
      }
      if (engine.pending() == 0) break;
    }
    const auto done = take<Engine::Done>(engine);
    CHECK_EQ(done.size(), std::size_t{1});
    CHECK(!done.empty() && values_of<float>(done[0].tensor) == (std::vector<float>{1, 2}));
  }
}

TEST("a value combined for an earlier run of a retried operation is not the new one's") {
  Engine engine({"group", Uid{1, 1}, nullptr});
  Engine::Options retry;
  retry.retry = true;
  engine.set_members(members_of(1, {{{1, 1}, "peer-0"}}), {});
  engine.start_value("x", {wire::encode(std::string("mine")), {}}, retry);
  const auto old = take<Engine::Combine>(engine);
  engine.set_members(members_of(2, {{{1, 1}, "peer-0"}, {{1, 2}, "peer-1"}}), {});
  CHECK_EQ(old.size(), std::size_t{1});
  engine.combined(old[0].op, old[0].run, old[0].payloads[0]);
  CHECK(take<Engine::Done>(engine).empty());
  CHECK_EQ(engine.pending(), std::size_t{1});
}

TEST("frames of an old epoch are not applied") {
  Members members(2);
  members.start(0, "x", floats(1), {buffer(std::vector<float>{7})});
  members.enter(2, 1);
  members.settle();  // the old frame arrives in epoch 2
  members.enter(2, 0);
  members.start(1, "x", floats(1), {buffer(std::vector<float>{1})});
  members.start(0, "x", floats(1), {buffer(std::vector<float>{2})});
  members.settle();
  CHECK(values_of<float>(members.done(1, 1)->tensor) == std::vector<float>{3});
}

TEST("values go to rank 0 in rank order and its result, or its error, to everyone") {
  Members members(3);
  members.on_combine([](std::vector<wire::Payload> payloads) {
    std::string all;
    for (const auto& payload : payloads) all += wire::decode<std::string>(payload.body);
    wire::Writer writer;
    writer(all);
    return std::variant<wire::Payload, Error>(wire::Payload{writer.take(), {}});
  });
  for (const std::size_t i : {2u, 0u, 1u}) members.start_value(i, "v", std::to_string(i));
  members.settle();
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK_EQ(wire::decode<std::string>(members.done(i, 1)->value.body), std::string("012"));
  }
  members.on_combine([](std::vector<wire::Payload>) {
    Error error;
    error.code = ErrorCode::remote;
    error.message = "division by zero";
    return std::variant<wire::Payload, Error>(error);
  });
  for (std::size_t i = 0; i < 3; ++i) members.start_value(i, "v", "x");
  members.settle();
  for (std::size_t i = 0; i < 3; ++i) CHECK(members.done(i, 2)->error.code == ErrorCode::remote);
}

TEST("cancelling at one member fails the operation at all, also where it starts later") {
  Members members(3);
  const auto one = buffer(std::vector<float>{1});
  const OpId id = members.start(0, "x", floats(1), {one});
  members.start(1, "x", floats(1), {one});
  Error error;
  error.code = ErrorCode::timeout;
  error.message = "peer-0 waited 5 s";
  members.cancel(0, id, error);
  members.settle();
  members.start(2, "x", floats(1), {one});
  members.settle();
  for (std::size_t i = 0; i < 3; ++i) CHECK(members.done(i, 1)->error.code == ErrorCode::timeout);
}

TEST("an operation's name is at most 1 KB long, here and from elsewhere") {
  Members members(2);
  const std::vector<Buffer> data = {buffer(std::vector<float>(1))};
  CHECK_THROWS(members.start(0, std::string(1089, 'x'), floats(1), data),
               ErrorCode::invalid_argument);
  members.start(0, std::string(1088, 'x'), floats(1), data);
  members.settle();
  const Frame frame{"group", 1, {std::string(1089, 'y'), 0}, Started{}};
  CHECK_THROWS(members.engine(1).received(Uid{1, 1}, {wire::encode(frame), {}}), ErrorCode::wire);
}

TEST("what others have begun is known by name; not what was begun here, nor of other epochs") {
  Members members(3);
  const std::vector<Buffer> data = {buffer(std::vector<float>(9000))};
  members.start(1, "y", floats(9000), data);
  members.start(2, "y", floats(9000), data);
  members.start(2, "z", floats(9000), data);
  members.settle();
  using Begun = std::map<std::string, std::vector<std::string>>;
  const Begun both = {{"y", {"peer-1", "peer-2"}}, {"z", {"peer-2"}}};
  CHECK(members.engine(0).begun_elsewhere() == both);
  CHECK(members.engine(2).begun_elsewhere().empty());
  members.start(0, "y", floats(9000), data);
  members.settle();
  CHECK(members.engine(0).begun_elsewhere() == (Begun{{"z", {"peer-2"}}}));
  members.enter(2);
  CHECK(members.engine(0).begun_elsewhere().empty());
}

TEST("who only waits for another asks there why, and all are told whose start is lacking") {
  for (const bool placed : {false, true}) {   // over messages, and with rank 0's word
    for (const bool begun : {true, false}) {  // at rank 0
      Members members(3);
      if (placed) members.on_one_host();
      members.enter(2);
      const std::int64_t count = placed ? 100000 : 1;
      const auto start = [&](std::size_t i) {
        const auto data = buffer(std::vector<float>(static_cast<std::size_t>(count)));
        Engine::Options options;
        if (placed) options.output = HeapAllocator().allocate(data.size());
        return members.start(i, "x", floats(count), {data}, options);
      };
      if (begun) start(0);
      const OpId id = start(1);
      members.settle();
      Error error;
      error.code = ErrorCode::timeout;
      error.message = "late";
      CHECK(members.ask_why(1, id, error));
      members.settle();
      CHECK_EQ(members.done(1, id) != nullptr, begun);
      if (!begun) start(0);  // before the other one has given up
      members.settle();
      for (const std::size_t i : {0, 1}) {
        const auto* done = members.done(i, 1);
        CHECK(done != nullptr && done->error.code == ErrorCode::timeout);
        if (done == nullptr) continue;
        CHECK_EQ(done->error.message, std::string("late; peer-0 waits for: peer-2"));
      }
      start(2);
      CHECK(members.done(2, 1) != nullptr);
    }
  }
}

TEST("what failed before it was started here keeps a note, and not its data") {
  // Room for one piece of 40 KB at a time: rank 0 has not started any of them.
  const auto both = members_of(1, {{{1, 1}, "peer-0"}, {{1, 2}, "peer-1"}});
  Engine here({"group", Uid{1, 1}, nullptr, std::size_t{100} << 10});
  Engine there({"group", Uid{1, 2}, nullptr});
  here.set_members(both, {});
  there.set_members(both, {});
  const auto data = buffer(std::vector<float>(10000, 1));
  const auto deliver = [](Engine& from, const Uid& sender, Engine& to) {
    for (const auto& send : take<Engine::Send>(from)) to.received(sender, send.payload);
  };
  Error error;
  error.code = ErrorCode::cancelled;
  for (int n = 0; n < 100; ++n) {
    const OpId id = there.start("never " + std::to_string(n), floats(10000), {data}, {});
    deliver(there, {1, 2}, here);
    there.cancel(id, error);
    deliver(there, {1, 2}, here);
  }
  CHECK(take<Engine::Send>(here).empty());  // nothing was refused
  const OpId late = here.start("never 7", floats(10000), {data}, {});
  const auto done = take<Engine::Done>(here);
  CHECK(done.size() == 1 && done[0].op == late && done[0].error.code == ErrorCode::cancelled);
}

TEST("frames of one that is no member are not kept, whatever their number") {
  const auto both = members_of(1, {{{1, 1}, "peer-0"}, {{1, 2}, "peer-1"}});
  Engine here({"group", Uid{1, 1}, nullptr, std::size_t{100} << 10});
  Engine stranger({"group", Uid{1, 2}, nullptr});
  stranger.set_members(both, {});
  here.set_members(members_of(1, {{{1, 1}, "peer-0"}, {{1, 3}, "peer-1"}}), {});
  for (int n = 0; n < 1000; ++n) {
    stranger.start("x", floats(1), {buffer(std::vector<float>{1})}, {});
    for (const auto& send : take<Engine::Send>(stranger)) here.received({1, 2}, send.payload);
  }
  CHECK(here.take_actions().empty());
  here.start("x", floats(1), {buffer(std::vector<float>{1})}, {});
  CHECK_EQ(here.pending(), std::size_t{1});
}

TEST("frames without data are counted, too") {
  const auto both = members_of(1, {{{1, 1}, "peer-0"}, {{1, 2}, "peer-1"}});
  Engine here({"group", Uid{1, 1}, nullptr, std::size_t{100} << 10});
  Engine there({"group", Uid{1, 2}, nullptr});
  here.set_members(both, {});
  there.set_members(both, {});
  for (int n = 0; n < 1000; ++n) {
    there.start("x", floats(0), {Buffer()}, {});
    for (const auto& send : take<Engine::Send>(there)) here.received({1, 2}, send.payload);
  }
  CHECK(!take<Engine::Send>(here).empty());  // refused
}

wire::Payload frame(std::string name, decltype(Frame::content) content,
                    std::vector<Buffer> parts = {}) {
  return {wire::encode(Frame{"group", 1, {std::move(name), 0}, std::move(content)}),
          std::move(parts)};
}

TEST("a failure that says no error is one") {
  Engine engine({"group", Uid{1, 2}, nullptr});
  engine.set_members(members_of(1, {{{1, 1}, "liar", {2, 1}}, {{1, 2}, "honest", {2, 1}}}), {});
  engine.use_shared_memory(1);
  Engine::Options options;
  options.output = HeapAllocator().allocate(400000);
  engine.start("x", floats(100000), {buffer(std::vector<float>(100000, 1))}, options);
  engine.take_actions();
  engine.received({1, 1}, frame("x", Failure{Error{}, 1, false}));
  bool ended = false;
  for (const auto& action : engine.take_actions()) {
    if (const auto* pass = std::get_if<Engine::Pass>(&action)) CHECK(pass->operation.abandoned);
    if (const auto* done = std::get_if<Engine::Done>(&action)) {
      CHECK(done->error);
      ended = true;
    }
  }
  CHECK(ended);
  engine.passed(1);
}

TEST("names of what comes early are counted, and what is not kept is not answered for ever") {
  Engine::Config config{"group", Uid{1, 2}, nullptr};
  config.early_bytes = std::size_t{1} << 20;
  Engine engine(config);
  engine.set_members(members_of(1, {{{1, 1}, "liar", {2, 1}}, {{1, 2}, "honest", {2, 1}}}), {});
  const Buffer part = HeapAllocator().allocate(2 << 20);
  std::size_t answers = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string name = std::string(1000, 'a') + std::to_string(i);
    engine.received({1, 1}, frame(name, Piece{}, {part}));
    answers += take<Engine::Send>(engine).size();
  }
  CHECK(answers > 0 && answers < 2000);
}

// The numbers come from the caller: an accumulator's leader numbers its rounds.
TEST("operations with numbers pass through shared memory without a message") {
  Members members(3);
  members.share_memory();
  OpSpec spec = floats(5000);
  spec.contributors = {0, 2};
  spec.divisor = 2;
  const auto begin = [&](std::size_t i, std::uint64_t round) {
    Engine::Options options;
    options.number = round;
    options.shared = round;
    options.output = HeapAllocator().allocate(20000);
    std::vector<Buffer> inputs;
    if (i != 1) inputs.push_back(buffer(std::vector<float>(5000, static_cast<float>(round))));
    if (i == 2) inputs.push_back(buffer(std::vector<float>(5000, 2)));
    return members.start(i, "round", spec, inputs, options);
  };
  for (const std::uint64_t round : {1, 2, 3}) {
    for (const std::size_t i : {0, 1, 2}) {
      CHECK_EQ(begin(i, round), OpId{round});
      if (i < 2) members.settle();
      if (i < 2) CHECK(members.done(0, round) == nullptr);
    }
    if (round == 2) members.cancel(1, round, make_error(ErrorCode::error, "no"));
    members.settle();
    for (const std::size_t i : {0, 1, 2}) {
      const Engine::Done* done = members.done(i, round);
      CHECK(done != nullptr);
      CHECK_EQ(static_cast<bool>(done->error), round == 2);
      if (round == 2) continue;
      const auto mean = static_cast<float>(round) + 1;
      CHECK(values_of<float>(done->tensor) == std::vector<float>(5000, mean));
    }
  }
}

TEST("wrong use is refused where it happens") {
  Members members(2);
  const auto one = buffer(std::vector<float>{1});
  CHECK_THROWS(members.start(0, "x", floats(2), {one}), ErrorCode::invalid_argument);
  CHECK_THROWS(members.start(0, "x", floats(1), {}), ErrorCode::invalid_argument);
  CHECK_THROWS(members.start(0, "x", floats(-1), {one}), ErrorCode::invalid_argument);
  OpSpec integers = floats(1, ReduceOp::mean);
  integers.dtype = tensor::DType::int32;
  CHECK_THROWS(members.start(0, "x", integers, {one}), ErrorCode::invalid_argument);
  OpSpec ranks = floats(1);
  ranks.contributors = {0, 2};
  CHECK_THROWS(members.start(0, "x", ranks, {one}), ErrorCode::invalid_argument);
  ranks.contributors = {1, 1};
  CHECK_THROWS(members.start(0, "x", ranks, {}), ErrorCode::invalid_argument);
  ranks.contributors = {1};
  CHECK_THROWS(members.start(0, "x", ranks, {one}), ErrorCode::invalid_argument);
  CHECK_THROWS(members.start(0, "x", floats(1, ReduceOp::bit_and), {one}),
               ErrorCode::invalid_argument);
  OpSpec from = floats(1);
  from.kind = Kind::broadcast;
  from.root = 2;
  CHECK_THROWS(members.start(0, "x", from, {one}), ErrorCode::invalid_argument);
  Engine alone({"group", Uid{9, 9}, nullptr, 0});
  CHECK_THROWS(alone.start("x", floats(1), {one}, {}), ErrorCode::closed);
}

TEST("a maximum is not of some members: the others take part with zeros") {
  Members members(2);
  OpSpec spec = floats(4, ReduceOp::max);
  spec.contributors = {0};
  CHECK_THROWS(members.start(0, "x", spec, {buffer(std::vector<float>(4))}),
               ErrorCode::invalid_argument);
}

}  // namespace engine_test
