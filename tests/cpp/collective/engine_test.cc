#include "collective/engine.h"

#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/random.h"
#include "check.h"

namespace {

using namespace moolink;
using namespace moolink::collective;

template <class T>
Buffer buffer(const std::vector<T>& values) {
  const MutableBuffer memory = HeapAllocator().allocate(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
  return memory;
}

template <class T>
std::vector<T> values_of(const Buffer& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Some engines, and messages between them that arrive in order for each pair and else at random.
class Members {
 public:
  // `hosts`: each one's, by number; empty: all are on one.
  explicit Members(std::size_t count, std::uint64_t seed = 1,
                   const std::vector<std::uint64_t>& hosts = {})
      : random_(seed) {
    for (const std::uint64_t host : hosts) members_.host_keys.push_back({2, host});
    for (std::size_t i = 0; i < count; ++i) {
      members_.instances.push_back({1, i + 1});
      members_.names.push_back("peer-" + std::to_string(i));
      Engine::Config config;
      config.scope = "group";
      config.self = members_.instances[i];
      engines_.push_back(std::make_unique<Engine>(std::move(config)));
    }
    enter(1);
  }

  void enter(std::uint64_t epoch, std::optional<std::size_t> only = {}) {
    members_.epoch = epoch;
    Error reason;
    reason.code = ErrorCode::group_changed;
    reason.message = "epoch " + std::to_string(epoch);
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      if (only && *only != i) continue;
      engines_[i]->set_members(members_, reason);
      drain(i);
    }
  }

  OpId start(std::size_t i, const std::string& name, OpSpec spec, std::vector<Buffer> inputs,
             Engine::Options options = {}) {
    const OpId id = engines_[i]->start(name, std::move(spec), std::move(inputs), options);
    drain(i);
    return id;
  }

  OpId start_value(std::size_t i, const std::string& name, const std::string& text) {
    wire::Writer writer;
    writer(text);
    const OpId id = engines_[i]->start_value(name, {writer.take(), {}}, {});
    drain(i);
    return id;
  }

  void cancel(std::size_t i, OpId id, Error error) {
    engines_[i]->cancel(id, std::move(error));
    drain(i);
  }

  // All of them share a segment of this epoch, as if they were on one host.
  void share_memory() {
    const PipelineLayout layout{members_.epoch, static_cast<std::uint32_t>(engines_.size()), 2,
                                std::uint64_t{16} << 10};
    const MutableBuffer segment = HeapAllocator().allocate(SharedPipeline::segment_bytes(layout));
    std::memset(segment.data(), 0, segment.size());
    SharedPipeline::initialise(segment.span(), layout);
    pipelines_.clear();
    for (std::uint32_t i = 0; i < engines_.size(); ++i) {
      pipelines_.push_back(
          std::make_unique<SharedPipeline>(segment.owner(), segment.span(), layout, i));
      engines_[i]->use_shared_memory(members_.epoch);
    }
  }
  void on_one_host() { members_.one_host = true; }

  // Delivers until nothing is under way, or until `steps` deliveries or steps of pipelines.
  void settle(std::size_t steps = ~std::size_t{0}) {
    for (; steps > 0; --steps) {
      bool worked = false;
      for (std::size_t i = 0; i < pipelines_.size(); ++i) {
        worked |= random_.chance(1, 2) && pipelines_[i]->step();
        for (const auto& ended : pipelines_[i]->take_ended()) {
          if (!ended.dry) engines_[i]->passed(ended.s);
          drain(i);
        }
      }
      if (worked && random_.chance(1, 2)) continue;
      std::vector<std::pair<std::size_t, std::size_t>> pairs;
      for (const auto& [pair, queue] : wire_) {
        if (!queue.empty()) pairs.push_back(pair);
      }
      if (pairs.empty() && !pipelines_.empty() && is_stepping()) continue;
      if (pairs.empty()) return;
      const auto pair = pairs[random_.below(pairs.size())];
      const wire::Payload payload = std::move(wire_[pair].front());
      wire_[pair].pop_front();
      CHECK_EQ(Engine::scope_of(payload), std::string("group"));
      engines_[pair.second]->received(members_.instances[pair.first], payload);
      drain(pair.second);
    }
  }

  const Engine::Done* done(std::size_t i, OpId id) const {
    const auto found = done_.find({i, id});
    return found == done_.end() ? nullptr : &found->second;
  }
  Engine& engine(std::size_t i) { return *engines_[i]; }
  void on_combine(std::function<std::variant<wire::Payload, Error>(std::vector<wire::Payload>)> f) {
    combine_ = std::move(f);
  }
  void drop_messages() { wire_.clear(); }
  std::size_t passed() const { return passed_; }

 private:
  bool is_stepping() {
    bool worked = false;
    for (const auto& pipeline : pipelines_) worked |= pipeline->step();
    return worked;
  }

  void drain(std::size_t i) {
    for (auto& action : engines_[i]->take_actions()) {
      if (auto* send = std::get_if<Engine::Send>(&action)) {
        for (std::size_t j = 0; j < engines_.size(); ++j) {
          if (members_.instances[j] == send->instance) wire_[{i, j}].push_back(send->payload);
        }
      } else if (auto* sum = std::get_if<Engine::Sum>(&action)) {
        run(sum->task);
        engines_[i]->summed(sum->op, sum->slice);
        drain(i);
      } else if (auto* combine = std::get_if<Engine::Combine>(&action)) {
        engines_[i]->combined(combine->op, combine_(std::move(combine->payloads)));
        drain(i);
      } else if (auto* pass = std::get_if<Engine::Pass>(&action)) {
        pipelines_[i]->start(std::move(pass->operation));
        ++passed_;
      } else if (auto* abandon = std::get_if<Engine::Abandon>(&action)) {
        pipelines_[i]->abandon(abandon->s);
      } else {
        auto& done = std::get<Engine::Done>(action);
        const auto id = done.op;
        CHECK(done_.emplace(std::pair{i, id}, std::move(done)).second);
      }
    }
  }

  Random random_;
  Engine::Members members_;
  std::vector<std::unique_ptr<SharedPipeline>> pipelines_;
  std::size_t passed_ = 0;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::map<std::pair<std::size_t, std::size_t>, std::deque<wire::Payload>> wire_;
  std::map<std::pair<std::size_t, OpId>, Engine::Done> done_;
  std::function<std::variant<wire::Payload, Error>(std::vector<wire::Payload>)> combine_;
};

OpSpec floats(std::int64_t count, ReduceOp op = ReduceOp::sum) {
  OpSpec spec;
  spec.op = op;
  spec.shape = {count};
  return spec;
}

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
        CHECK(values_of<float>(done->tensor) == expected);
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
  some.reducers = {0, 2};
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

// --- collectives that rank 0 lets begin

constexpr Kind kKinds[] = {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather,
                           Kind::broadcast,  Kind::gather,         Kind::scatter};

struct Collective {
  Collective(Kind kind, std::uint32_t root, std::size_t members, std::int64_t count) {
    spec = floats(count);
    spec.kind = kind;
    spec.root = has_root(kind) ? root : 0;
    passage = spec.passage(members);
    for (std::uint32_t rank = 0; rank < members; ++rank) {
      std::vector<float> input(input_bytes(passage, rank) / 4);
      for (std::size_t i = 0; i < input.size(); ++i) {
        input[i] = 1.0f / static_cast<float>(1 + rank + i % 97);
      }
      inputs.push_back(buffer(input));
      outputs.push_back(HeapAllocator().allocate(output_bytes(passage, rank)));
    }
  }

  OpId start(Members& members, std::uint32_t rank, const std::string& name) const {
    Engine::Options options;
    options.output = outputs[rank];
    options.lent = true;
    return members.start(rank, name, spec, {inputs[rank]}, options);
  }

  std::vector<float> expected(std::uint32_t rank) const {
    const std::size_t count = passage.count;
    std::vector<float> result;
    const auto add = [&](std::uint32_t from, std::size_t at) {
      const auto part = values_of<float>(inputs[from]);
      result.insert(result.end(), part.begin() + static_cast<std::ptrdiff_t>(at),
                    part.begin() + static_cast<std::ptrdiff_t>(at + count));
    };
    const bool part = spec.kind == Kind::reduce_scatter || spec.kind == Kind::scatter;
    const std::size_t at = part ? rank * count : 0;
    if (reduces(spec.kind)) {
      add(0, at);
      for (std::uint32_t from = 1; from < passage.ranks; ++from) {
        const auto next = values_of<float>(inputs[from]);
        for (std::size_t i = 0; i < count; ++i) result[i] += next[at + i];
      }
    } else if (spec.kind == Kind::all_gather || spec.kind == Kind::gather) {
      if (spec.kind == Kind::gather && rank != spec.root) return {};
      for (std::uint32_t from = 0; from < passage.ranks; ++from) add(from, 0);
    } else {
      add(spec.root, at);
    }
    return result;
  }

  OpSpec spec;
  Passage passage;
  std::vector<Buffer> inputs;
  std::vector<MutableBuffer> outputs;
};

TEST("every collective, over messages and through shared memory, for any number of members") {
  for (const bool shared : {false, true}) {
    for (std::uint32_t k = 1; k <= 5; ++k) {
      for (const std::int64_t count : {0, 1, 300, 20011}) {
        Members members(k, 100 * k + static_cast<std::uint64_t>(count));
        if (shared) {
          members.on_one_host();
          members.enter(2);
          members.share_memory();
        }
        std::vector<Collective> collectives;
        for (const Kind kind : kKinds) collectives.emplace_back(kind, k / 2, k, count);
        for (std::uint32_t rank = 0; rank < k; ++rank) {
          for (std::size_t n = 0; n < collectives.size(); ++n) {
            const std::size_t which = (n + rank) % collectives.size();  // in any order
            collectives[which].start(members, rank, kind_name(kKinds[which]));
            members.settle(3);
          }
        }
        members.settle();
        CHECK_EQ(members.passed() != 0, shared);
        for (const Collective& collective : collectives) {
          for (std::uint32_t rank = 0; rank < k; ++rank) {
            CHECK(values_of<float>(collective.outputs[rank]) == collective.expected(rank));
          }
        }
        for (std::uint32_t rank = 0; rank < k; ++rank) {
          CHECK_EQ(members.engine(rank).pending(), std::size_t{0});
          for (OpId id = 1; id <= collectives.size(); ++id) {
            CHECK(members.done(rank, id) != nullptr && !members.done(rank, id)->error);
          }
        }
      }
    }
  }
}

TEST("what a member gives up at any moment ends at all, and holds up nothing that follows") {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    constexpr std::uint32_t kMembers = 3;
    Random random(seed);
    Members members(kMembers, seed);
    members.on_one_host();
    members.enter(2);
    if (random.chance(3, 4)) members.share_memory();
    std::vector<Collective> collectives;
    for (std::size_t n = 0; n < 4; ++n) {
      collectives.emplace_back(n == 3 ? Kind::all_reduce : kKinds[random.below(6)], 1, kMembers,
                               20000);
    }
    const auto who = static_cast<std::uint32_t>(random.below(kMembers));
    const std::size_t which = random.below(3);
    const std::size_t when = random.below(60);
    std::map<std::pair<std::uint32_t, std::size_t>, OpId> ids;
    for (std::size_t n = 0; n < collectives.size(); ++n) {
      for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
        ids[{rank, n}] = collectives[n].start(members, rank, "x" + std::to_string(n));
      }
      if (n == which) {
        members.settle(when);
        members.cancel(who, ids[{who, n}], make_error(ErrorCode::cancelled, "given up"));
      }
      members.settle(random.below(4));
    }
    members.settle();
    for (std::size_t n = 0; n < collectives.size(); ++n) {
      for (std::uint32_t rank = 0; rank < kMembers; ++rank) {
        const auto* done = members.done(rank, ids[{rank, n}]);
        CHECK(done != nullptr);
        if (done == nullptr) continue;
        if (done->error) {
          CHECK(n == which && done->error.code == ErrorCode::cancelled);
        } else {
          CHECK(values_of<float>(collectives[n].outputs[rank]) == collectives[n].expected(rank));
        }
      }
    }
  }
}

TEST("collectives that differ fail at all and name both, also in shared memory") {
  for (const bool shared : {false, true}) {
    Members members(3);
    members.on_one_host();
    members.enter(2);
    if (shared) members.share_memory();
    const Collective one(Kind::broadcast, 0, 3, 50000);
    const Collective other(Kind::broadcast, 1, 3, 50000);
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      (rank == 2 ? other : one).start(members, rank, "x");
    }
    members.settle();
    const Collective next(Kind::all_reduce, 0, 3, 50000);
    for (std::uint32_t rank = 0; rank < 3; ++rank) next.start(members, rank, "x");
    members.settle();
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      const auto* done = members.done(rank, 1);
      CHECK(done != nullptr && done->error.message.find("root 1") != std::string::npos &&
            done->error.message.find("peer-2") != std::string::npos);
      CHECK(values_of<float>(next.outputs[rank]) == next.expected(rank));
    }
  }
}

TEST("a change of epoch ends what passes through shared memory, or begins it again") {
  Members members(2);
  members.on_one_host();
  members.enter(2);
  members.share_memory();
  const Collective lost(Kind::all_reduce, 0, 2, 50000);
  const Collective kept(Kind::all_reduce, 0, 2, 50000);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    lost.start(members, rank, "lost");
    Engine::Options retry;
    retry.retry = true;
    retry.output = kept.outputs[rank];
    members.start(rank, "kept", kept.spec, {kept.inputs[rank]}, retry);
  }
  members.settle(8);
  members.drop_messages();
  members.enter(3);
  members.share_memory();
  members.settle();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    CHECK(members.done(rank, 1)->error.code == ErrorCode::group_changed);
    CHECK(values_of<float>(kept.outputs[rank]) == kept.expected(rank));
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
  Engine alone({"group", Uid{9, 9}, nullptr, 0});
  CHECK_THROWS(alone.start("x", floats(1), {one}, {}), ErrorCode::closed);
}

// --- several hosts

OpSpec compressed(std::int64_t count, Compression compression) {
  OpSpec spec = floats(count);
  spec.compression = compression;
  return spec;
}

TEST("members of several hosts get the same bits, small and large, early or late") {
  for (const std::uint32_t count : {0u, 7u, 100'003u}) {
    Members members(5, count, {0, 1, 0, 2, 1});
    std::vector<OpId> ids;
    for (std::size_t i = 0; i < 5; ++i) {
      std::vector<float> input(count);
      for (std::size_t k = 0; k < count; ++k) input[k] = static_cast<float>(k % 7 + i) / 3;
      ids.push_back(members.start(i, "x", floats(count), {buffer(input)}));
      members.settle();
    }
    const Engine::Done* first = members.done(0, ids[0]);
    CHECK(first != nullptr && !first->error);
    for (std::size_t i = 1; i < 5; ++i) {
      const Engine::Done* done = members.done(i, ids[i]);
      CHECK(done != nullptr && !done->error);
      CHECK(values_of<float>(done->tensor) == values_of<float>(first->tensor));
    }
    const std::vector<float> result = values_of<float>(first->tensor);
    for (std::size_t k = 0; k < result.size(); ++k) {
      const float expected = static_cast<float>(5 * (k % 7) + 10) / 3;
      CHECK(result[k] - expected < 1e-4f && expected - result[k] < 1e-4f);
    }
  }
}

TEST("members of several hosts who disagree are told so, wherever they are") {
  Members members(4, 3, {0, 0, 1, 1});
  std::vector<OpId> ids;
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint32_t count = i == 3 ? 40'000 : 40'001;
    ids.push_back(members.start(i, "x", floats(count), {buffer(std::vector<float>(count, 1.0f))}));
  }
  members.settle();
  for (std::size_t i = 0; i < 4; ++i) {
    const Engine::Done* done = members.done(i, ids[i]);
    CHECK(done != nullptr && done->error.message.find("40000") != std::string::npos);
  }
}

TEST("what waits for a member of another host says so, and a cancelled one ends everywhere") {
  Members members(3, 4, {0, 0, 1});
  const std::vector<float> ones(1000, 1.0f);
  const OpId first = members.start(0, "x", floats(1000), {buffer(ones)});
  const OpId second = members.start(1, "x", floats(1000), {buffer(ones)});
  members.settle();
  CHECK(members.engine(0).waiting_for(first) == std::vector<std::string>{"peer-2"});
  CHECK(members.engine(1).waiting_for(second) == std::vector<std::string>{"peer-0"});
  Error enough;
  enough.code = ErrorCode::cancelled;
  members.cancel(1, second, enough);
  members.settle();
  CHECK(members.done(0, first) != nullptr && members.done(0, first)->error);
}

TEST("an input of the user is the user's again when the member is done, also between hosts") {
  for (const std::uint32_t count : {16'384u, 50'000u}) {  // by doubling, by a ring
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      Members members(2, seed, {0, 1});
      Engine::Options lent;
      lent.lent = true;
      std::vector<MutableBuffer> inputs;
      std::vector<OpId> ids;
      for (std::size_t i = 0; i < 2; ++i) {
        inputs.push_back(HeapAllocator().allocate(count * sizeof(float)));
        std::memset(inputs[i].data(), 0, inputs[i].size());
        ids.push_back(members.start(i, "x", floats(count), {inputs[i]}, lent));
      }
      for (int step = 0; step < 1000; ++step) {
        members.settle(1);
        for (std::size_t i = 0; i < 2; ++i) {
          if (members.done(i, ids[i]) == nullptr) continue;
          std::memset(inputs[i].data(), 0x7f, inputs[i].size());
        }
      }
      for (std::size_t i = 0; i < 2; ++i) {
        CHECK(members.done(i, ids[i]) != nullptr);
        for (const float value : values_of<float>(members.done(i, ids[i])->tensor)) {
          CHECK_EQ(value, 0.0f);
        }
      }
    }
  }
}

TEST("compression keeps what it loses for the next operation of the name, in one epoch") {
  Members members(2, 5, {0, 1});
  const std::vector<float> input(40'000, 1.003f);  // no bfloat16
  std::vector<double> sums;
  for (const std::uint64_t epoch : {2u, 3u}) {
    members.enter(epoch);
    double sum = 0;
    for (int time = 0; time < 64; ++time) {
      std::vector<OpId> ids;
      for (std::size_t i = 0; i < 2; ++i) {
        ids.push_back(
            members.start(i, "x", compressed(40'000, Compression::bf16), {buffer(input)}));
      }
      members.settle();
      const auto a = values_of<float>(members.done(0, ids[0])->tensor);
      CHECK(a == values_of<float>(members.done(1, ids[1])->tensor));
      sum += static_cast<double>(a[39'999]);
    }
    sums.push_back(sum / 64);
  }
  for (const double mean : sums) CHECK(mean > 2.0055 && mean < 2.0065);
  CHECK_EQ(sums[0], sums[1]);  // begun anew with the epoch
}

TEST("compression is refused where it has no meaning") {
  Members members(2, 6, {0, 1});
  OpSpec spec = compressed(10, Compression::int8);
  spec.op = ReduceOp::max;
  const Buffer input = buffer(std::vector<float>(10, 1.0f));
  CHECK_THROWS(members.start(0, "x", spec, {input}), ErrorCode::invalid_argument);
  spec.op = ReduceOp::sum;
  spec.dtype = tensor::DType::int32;
  CHECK_THROWS(members.start(0, "x", spec, {input}), ErrorCode::invalid_argument);
}

}  // namespace
