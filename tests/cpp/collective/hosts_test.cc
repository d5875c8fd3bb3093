// Collectives of members on several hosts.

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "collective/engine.h"
#include "collective/epoch_members.h"
#include "collective/members.h"

namespace hosts_test {

using namespace moolink;
using namespace moolink::collective;

OpSpec compressed(std::int64_t count, Compression compression) {
  OpSpec spec = floats(count);
  spec.compression = compression;
  return spec;
}

// An allreduce "x" of zeros at each member, in memory that is the user's after the operation.
std::pair<std::vector<MutableBuffer>, std::vector<OpId>> start_lent_zeros(Members& members,
                                                                          std::size_t number,
                                                                          std::uint32_t count) {
  Engine::Options lent;
  lent.lent = true;
  std::vector<MutableBuffer> inputs;
  std::vector<OpId> ids;
  for (std::size_t i = 0; i < number; ++i) {
    inputs.push_back(HeapAllocator().allocate(count * sizeof(float)));
    std::memset(inputs[i].data(), 0, inputs[i].size());
    ids.push_back(members.start(i, "x", floats(count), {inputs[i]}, lent));
  }
  return {std::move(inputs), std::move(ids)};
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

// As in a round of an accumulator: hosts of three members, of two, and of two without inputs.
TEST("what only some contribute to crosses the link of each host once each way") {
  for (const std::uint32_t count : {2'000u, 100'003u, 1'000'000u}) {  // by doubling, by trees
    Members members(7, count, {0, 0, 0, 1, 1, 2, 2});
    members.share_memory();
    OpSpec spec = floats(count);
    spec.contributors = {0, 1, 4};
    spec.divisor = 2;
    const auto input = [&](float add) {
      std::vector<float> values(count);
      for (std::size_t k = 0; k < count; ++k) values[k] = static_cast<float>(k % 7) + add;
      return buffer(values);
    };
    std::vector<OpId> ids;
    Engine::Options shared;
    shared.shared = 1;
    for (std::size_t i = 0; i < 7; ++i) {
      std::vector<Buffer> inputs;
      if (i == 0 || i == 1 || i == 4) inputs.push_back(input(static_cast<float>(i)));
      if (i == 1) inputs.push_back(input(3));
      ids.push_back(members.start(i, "x", spec, std::move(inputs), shared));
      if (i % 3 == 2) members.settle(i);
    }
    members.settle();
    std::vector<float> expected(count);
    for (std::size_t k = 0; k < count; ++k) expected[k] = static_cast<float>(2 * (k % 7) + 4);
    for (std::size_t i = 0; i < 7; ++i) {
      const Engine::Done* done = members.done(i, ids[i]);
      CHECK(done != nullptr && !done->error);
      CHECK(values_of<float>(done->tensor) == expected);
    }
    const std::size_t payload = count * sizeof(float);
    CHECK_EQ(members.passed(), std::size_t{7});
    CHECK_EQ(members.bytes_between_hosts(), 4 * payload);
  }
}

TEST("a piece is refused where members exchange portions") {
  Members members(4, 7, {0, 0, 1, 1});
  const OpSpec spec = floats(100'003);
  const OpId id = members.start(0, "x", spec, {buffer(std::vector<float>(100'003, 1.0f))});
  const Frame frame{"group", 1, {"x", 0}, Piece{spec}};
  members.receive(0, 1, {wire::encode(frame), {buffer(std::vector<float>(25'001))}});
  CHECK(members.done(0, id) != nullptr);
  CHECK_EQ(members.done(0, id)->error.code, ErrorCode::error);
}

// As in a round of an accumulator, observers and some members have no input.
TEST("over messages, observers get the result, and not every member needs an input") {
  for (const std::uint32_t count : {0u, 3u, 100'003u}) {
    for (const std::size_t hosts : {1, 5}) {
      std::vector<std::uint64_t> numbers;
      for (std::uint64_t i = 0; i < 5; ++i) numbers.push_back(i % hosts);
      Members members(5, count, numbers, {3, 4});
      OpSpec spec = floats(count);
      spec.contributors = {0, 2};
      spec.divisor = 2;
      std::vector<OpId> ids;
      for (std::size_t i = 0; i < 5; ++i) {
        std::vector<Buffer> inputs;
        if (spec.contributes(static_cast<std::uint32_t>(i))) {
          inputs.push_back(buffer(std::vector<float>(count, 3.0f)));
        }
        ids.push_back(members.start(i, "x", spec, std::move(inputs)));
        if (i == 2) members.settle(count % 50);
      }
      members.settle();
      for (std::size_t i = 0; i < 5; ++i) {
        const Engine::Done* done = members.done(i, ids[i]);
        CHECK(done != nullptr && !done->error);
        CHECK(values_of<float>(done->tensor) == std::vector<float>(count, 3.0f));
      }
    }
  }
}

// Over messages and through shared memory. The members write in different orders.
TEST("an input is read only as far as it is written") {
  for (const std::uint32_t count : {3u, 100'003u, 1'000'000u}) {
    for (const bool shared : {false, true}) {
      Members members(4, count, {0, 0, 1, 1});
      if (shared) members.share_memory();
      Engine::Options options;
      if (shared) options.shared = 1;
      std::vector<MutableBuffer> inputs;
      std::vector<std::shared_ptr<Progress>> written;
      std::vector<OpId> ids;
      for (std::size_t i = 0; i < 4; ++i) {
        inputs.push_back(HeapAllocator().allocate(count * sizeof(float)));
        std::memset(inputs[i].data(), 0x5b, inputs[i].size());
        written.push_back(std::make_shared<Progress>());
        options.written.buffers = {written[i]};
        ids.push_back(members.start(i, "x", floats(count), {inputs[i]}, options));
        members.settle();
      }
      const std::uint64_t sent = members.bytes_between_hosts();
      CHECK_EQ(sent, std::uint64_t{0});
      const auto write = [&](std::size_t i, std::uint64_t end) {
        auto* elements = reinterpret_cast<float*>(inputs[i].data());
        std::fill(elements, elements + end, 1.0f);
        written[i]->reach(end * sizeof(float));
        members.inputs_written(i);
        members.settle();
      };
      for (const std::size_t i : {2, 0, 3, 1}) write(i, count / 2);
      // Most of the written half has been exchanged.
      const std::uint64_t half = std::uint64_t{count} * sizeof(float);
      if (count == 1'000'000) CHECK(members.bytes_between_hosts() > half * 7 / 10);
      for (std::size_t i = 0; i < 4; ++i) CHECK(members.done(i, ids[i]) == nullptr);
      for (const std::size_t i : {3, 1, 0, 2}) write(i, count);
      for (std::size_t i = 0; i < 4; ++i) {
        const Engine::Done* done = members.done(i, ids[i]);
        CHECK(done != nullptr && !done->error);
        CHECK(values_of<float>(done->tensor) == std::vector<float>(count, 4.0f));
      }
    }
  }
}

// Members exchange them as float32, twice as long as what is written.
TEST("float16 inputs are exchanged when they are written") {
  for (const std::uint32_t count : {3u, 100'003u}) {
    Members members(3, count);
    OpSpec spec = floats(count);
    spec.dtype = tensor::DType::float16;
    const std::vector<std::uint16_t> halves(count, float_to_half(0.5f));
    Engine::Options options;
    std::vector<std::shared_ptr<Progress>> written;
    std::vector<OpId> ids;
    for (std::size_t i = 0; i < 3; ++i) {
      written.push_back(std::make_shared<Progress>());
      options.written.buffers = {written[i]};
      ids.push_back(members.start(i, "x", spec, {buffer(halves)}, options));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      written[i]->reach(halves.size() * sizeof(std::uint16_t));
      members.inputs_written(i);
    }
    members.settle();
    for (std::size_t i = 0; i < 3; ++i) {
      const Engine::Done* done = members.done(i, ids[i]);
      CHECK(done != nullptr && !done->error);
      CHECK(values_of<std::uint16_t>(done->tensor) ==
            std::vector<std::uint16_t>(count, float_to_half(1.5f)));
    }
  }
}

// The member that sends the observer the result gets its memory back before the other has read it.
TEST("an observer gets the result into given memory, and not from the memory of another's user") {
  for (const std::uint32_t count : {3u, 100'003u}) {
    Members members(2, count, {0, 1}, {1});
    OpSpec spec = floats(count);
    spec.contributors = {0};
    std::vector<MutableBuffer> outputs;
    std::vector<OpId> ids;
    for (std::size_t i = 0; i < 2; ++i) {
      Engine::Options options;
      outputs.push_back(HeapAllocator().allocate(count * sizeof(float)));
      options.output = outputs[i];
      std::vector<Buffer> inputs;
      if (i == 0) inputs.push_back(buffer(std::vector<float>(count, 3.0f)));
      ids.push_back(members.start(i, "x", spec, std::move(inputs), options));
    }
    CHECK(members.done(0, ids[0]) != nullptr);
    std::memset(outputs[0].data(), 0x7f, outputs[0].size());
    members.settle();
    CHECK(members.done(1, ids[1]) != nullptr);
    CHECK(values_of<float>(outputs[1]) == std::vector<float>(count, 3.0f));
  }
}

TEST("a member whose input is not written waits for no other member") {
  Members members(3, 1, {0, 1, 2});
  const std::uint32_t count = 100'003;
  std::vector<OpId> ids;
  for (std::size_t i = 0; i < 3; ++i) {
    Engine::Options options;
    if (i == 1) options.written.buffers = {std::make_shared<Progress>()};
    const Buffer input = buffer(std::vector<float>(count));
    ids.push_back(members.start(i, "x", floats(count), {input}, options));
  }
  members.settle();
  CHECK(members.engine(1).waiting_for(ids[1]).empty());
  CHECK(!members.engine(0).waiting_for(ids[0]).empty());
}

// An observer on a host of its own leads no lane and has no pipeline.
TEST("guests get the result from the leaders of one host") {
  for (const std::uint32_t count : {0u, 3u, 100'003u}) {
    for (const bool two_hosts : {true, false}) {
      Members members(5, count, {0, 0, two_hosts ? 1u : 0u, 2, 2}, {3, 4});
      members.share_memory();
      OpSpec spec = floats(count);
      spec.contributors = {0, 2};
      Engine::Options shared;
      shared.shared = 1;
      std::vector<OpId> ids;
      for (std::size_t i = 0; i < 5; ++i) {
        std::vector<Buffer> inputs;
        if (i % 2 == 0 && i < 4) inputs.push_back(buffer(std::vector<float>(count, 1.5f)));
        ids.push_back(members.start(i, "x", spec, std::move(inputs), shared));
        if (i == 2) members.settle(count % 50);
      }
      members.settle();
      CHECK_EQ(members.passed(), std::size_t{3});
      for (std::size_t i = 0; i < 5; ++i) {
        const Engine::Done* done = members.done(i, ids[i]);
        CHECK(done != nullptr && !done->error);
        CHECK(values_of<float>(done->tensor) == std::vector<float>(count, 3.0f));
      }
    }
  }
}

TEST("an operation that fails ends at a guest, which has no pipeline to give it up in") {
  Members members(3, 1, {0, 0, 1}, {2});
  members.share_memory();
  OpSpec spec = floats(100);
  spec.contributors = {0, 1};
  Engine::Options shared;
  shared.shared = 1;
  const OpId id = members.start(2, "x", spec, {}, shared);
  members.start(0, "x", spec, {buffer(std::vector<float>(100))}, shared);
  members.cancel(0, 1, make_error(ErrorCode::cancelled, "enough"));
  members.settle();
  CHECK_EQ(members.done(2, id)->error.code, ErrorCode::cancelled);
}

TEST("a guest leads no lane") {
  const Hosts hosts = hosts_of({{1, 0}, {1, 0}, {1, 1}, {1, 1}, {1, 2}}, {4});
  CHECK(hosts.count() == 2u && hosts.lanes == 2u && hosts.is_guest(4) && !hosts.is_guest(3));
  CHECK(hosts.lane(4) == std::nullopt && hosts.of[4] == 0u && hosts.share_memory());
  CHECK(!hosts_of({{1, 0}, {1, 2}}, {1}).share_memory());
  CHECK(hosts_of({{1, 0}, {1, 0}, {1, 2}}, {2}).share_memory());
}

TEST("early portions beyond the limit fail the operation, not this process") {
  Members members(4, 9, {0, 0, 1, 1});
  members.share_memory();
  const std::uint32_t count = 100'000;
  const OpId id = members.start(0, "x", floats(count), {buffer(std::vector<float>(count, 1.0f))});
  const std::vector<std::byte> elements(std::size_t{1} << 20);
  for (std::uint32_t chain = 0; chain < 20 && members.done(0, id) == nullptr; ++chain) {
    const Frame frame{"group", 1, {"x", 0}, Portion{floats(count), chain, 0}};
    members.receive(0, 2, {wire::encode(frame), {buffer(elements)}});
  }
  CHECK(members.done(0, id) != nullptr && members.done(0, id)->error);
}

TEST("a host has as many leaders as each other host can have") {
  const Hosts hosts = hosts_of({{1, 0}, {1, 1}, {1, 0}, {1, 1}, {1, 1}});
  CHECK_EQ(hosts.lanes, 2u);
  CHECK(hosts.lane(2) == 1u && hosts.lane(3) == 1u && hosts.lane(4) == std::nullopt);
  CHECK(hosts.share_memory() && !hosts_of({{1, 0}, {1, 1}}).share_memory());
  CHECK(!hosts_of({{1, 0}, {1, 0}}).share_memory());
}

TEST("all members of a host send to other hosts") {
  Members members(4, 5, {0, 0, 1, 1});
  members.share_memory();
  const std::uint32_t count = 1'000'000;
  std::vector<OpId> ids;
  for (std::size_t i = 0; i < 4; ++i) {
    ids.push_back(members.start(i, "x", floats(count), {buffer(std::vector<float>(count, 1.0f))}));
  }
  members.settle();
  const std::uint64_t all = members.bytes_between_hosts();
  CHECK_EQ(all, std::uint64_t{2} * count * sizeof(float));
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint64_t sent = members.bytes_between_hosts_from(i);
    CHECK(sent > all / 4 * 8 / 10 && sent < all / 4 * 12 / 10);
    const Engine::Done* done = members.done(i, ids[i]);
    CHECK(done != nullptr && !done->error);
    CHECK(values_of<float>(done->tensor) == std::vector<float>(count, 4.0f));
  }
}

// Abandoned data may be meaningless when others sum it, so no other host may end with it.
TEST("no member gets a result that includes data that another has abandoned") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Members members(4, seed, {0, 0, 1, 1});
    members.share_memory();
    const std::uint32_t count = 300'000;
    const auto [inputs, ids] = start_lent_zeros(members, 4, count);
    members.settle(seed);
    if (members.done(1, ids[1]) == nullptr) {
      Error enough;
      enough.code = ErrorCode::cancelled;
      members.cancel(1, ids[1], enough);
      std::memset(inputs[1].data(), 0x7f, inputs[1].size());
    }
    members.settle();
    for (std::size_t i = 0; i < 4; ++i) {
      const Engine::Done* done = members.done(i, ids[i]);
      CHECK(done != nullptr);
      if (done->error) continue;
      for (const float value : values_of<float>(done->tensor)) CHECK_EQ(value, 0.0f);
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
  for (const std::uint32_t count : {16'384u, 150'000u}) {  // by doubling, by a tree
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      Members members(2, seed, {0, 1});
      const auto [inputs, ids] = start_lent_zeros(members, 2, count);
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

TEST("a lent input is the user's again after a failure, and others end without what it becomes") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Members members(2, seed, {0, 1});
    const std::uint32_t count = 150'000;
    const auto [inputs, ids] = start_lent_zeros(members, 2, count);
    members.settle(seed % 20);
    if (members.done(1, ids[1]) != nullptr) continue;
    members.enter(2, 1);  // the other learns of it later
    std::memset(inputs[1].data(), 0x7f, inputs[1].size());
    members.settle();
    const Engine::Done* done = members.done(0, ids[0]);
    if (done == nullptr || done->error) continue;
    CHECK(values_of<float>(done->tensor) == std::vector<float>(count));
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

}  // namespace hosts_test
