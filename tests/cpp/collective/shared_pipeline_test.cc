#include "collective/shared_pipeline.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "edges.h"
#include "io/doorbell.h"
#include "memory/segment.h"

namespace moolink::collective {
namespace shared_pipeline_test {

PipelineLayout layout_of(std::uint32_t ranks, std::uint64_t window_bytes = 4096) {
  return {7, ranks, 3, window_bytes};
}

struct Ranks {
  explicit Ranks(const PipelineLayout& layout)
      : segment(memory::Segment::create(PipelineSegment::bytes_of(layout), "test")) {
    PipelineSegment::initialise(segment->bytes(), layout);
    for (std::uint32_t rank = 0; rank < layout.ranks; ++rank) {
      pipelines.push_back(std::make_unique<SharedPipeline>(
          PipelineSegment(segment, segment->bytes(), layout), rank, heap,
          [this](std::uint32_t lender, std::uint64_t number) {
            return std::make_shared<const std::span<const std::byte>>(
                lent.at(lender).at(number - 1).span());
          }));
      bells.push_back(io::make_doorbell());
    }
  }
  SharedPipeline& operator[](std::size_t rank) { return *pipelines[rank]; }

  HeapAllocator heap;
  std::shared_ptr<memory::Segment> segment;
  std::vector<std::unique_ptr<SharedPipeline>> pipelines;
  std::vector<io::Doorbell> bells;
  std::vector<std::vector<Buffer>> lent;  // segment n of each rank is at n - 1
};

MutableBuffer floats(std::uint64_t count, float value) {
  MutableBuffer buffer = HeapAllocator().allocate(4 * count);
  auto* elements = reinterpret_cast<float*>(buffer.data());
  for (std::uint64_t i = 0; i < count; ++i) elements[i] = value + static_cast<float>(i % 5);
  return buffer;
}

bool is_filled(const Buffer& buffer, float scale, float value) {
  const auto* elements = reinterpret_cast<const float*>(buffer.data());
  for (std::uint64_t i = 0; i < buffer.size() / 4; ++i) {
    if (elements[i] != value + scale * static_cast<float>(i % 5)) return false;
  }
  return true;
}

PipelineOperation sum(std::uint64_t s, std::uint32_t ranks, std::uint64_t count, float value) {
  PipelineOperation operation;
  operation.s = s;
  operation.passage = {Kind::all_reduce, 0, ranks, 4, count};
  operation.dtype = tensor::DType::float32;
  operation.inputs = {floats(count, value)};
  operation.output = HeapAllocator().allocate(4 * count);
  return operation;
}

// Until operation `last` has ended; sleeps whenever there is nothing to do. Returns what ended.
std::vector<SharedPipeline::Ended> run_until(Ranks& ranks, std::uint32_t rank, std::uint64_t last) {
  SharedPipeline& pipeline = ranks[rank];
  check::Edges edges(ranks.bells[rank].watched.get());
  std::vector<SharedPipeline::Ended> all;
  const auto ring = [&] {
    for (const std::uint32_t sleeper : pipeline.take_wakeups()) io::ring(ranks.bells[sleeper].rung);
  };
  while (all.empty() || all.back().s < last) {
    while (pipeline.step()) ring();
    for (const auto& ended : pipeline.take_ended()) all.push_back(ended);
    if (!all.empty() && all.back().s >= last) break;
    if (pipeline.announce_sleep() && pipeline.may_sleep()) CHECK(edges.next(20000));
    pipeline.awake();
  }
  while (pipeline.step()) ring();
  return all;
}

TEST("shared pipeline: threads that sleep whenever they must, several operations under way") {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint64_t kOperations = 60;
  Ranks ranks(layout_of(kRanks));
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&ranks, rank] {
      for (std::uint64_t s = 1; s <= kOperations; s += 3) {
        std::vector<PipelineOperation> started;
        for (std::uint64_t i = s; i < s + 3; ++i) {
          started.push_back(sum(i, kRanks, 200 * i, static_cast<float>(i + rank)));
          ranks[rank].start(started.back());
        }
        for (const auto& ended : run_until(ranks, rank, s + 2)) CHECK(!ended.abandoned);
        for (const PipelineOperation& operation : started) {
          CHECK(is_filled(operation.output, 3, static_cast<float>(3 * operation.s + 3)));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Whoever's operation has ended writes to its memory at once.
TEST("shared pipeline: threads read in place what others lend, while some pass through windows") {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint64_t kOperations = 40;
  constexpr std::uint64_t kCount = 20000;
  Ranks ranks(layout_of(kRanks));
  std::vector<MutableBuffer> memory;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    memory.push_back(HeapAllocator().allocate(4 * kCount));
    ranks.lent.push_back({memory.back()});
  }
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (std::uint64_t s = 1; s <= kOperations; ++s) {
        PipelineOperation operation = sum(s, kRanks, kCount, static_cast<float>(s + rank));
        std::memcpy(memory[rank].data(), operation.inputs[0].data(), memory[rank].size());
        operation.inputs = {memory[rank]};
        operation.output = memory[rank];
        if ((s + rank) % 4 != 0) operation.lent = {1, 0};
        ranks[rank].start(operation);
        for (const auto& ended : run_until(ranks, rank, s)) CHECK(!ended.abandoned);
        CHECK(is_filled(memory[rank], 3, static_cast<float>(3 * s + 3)));
        std::memset(memory[rank].data(), 0xff, memory[rank].size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST("shared pipeline: a place outside of what was lent is not read") {
  constexpr std::uint64_t kCount = 64;
  for (const LentPlace place : {LentPlace{1, 1}, LentPlace{1, ~std::uint64_t{0}}}) {
    Ranks ranks(layout_of(2));
    std::vector<PipelineOperation> operations;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      PipelineOperation operation = sum(1, 2, kCount, 1);
      operation.output = floats(kCount, 1);
      operation.inputs = {operation.output};
      if (rank == 1) operation.lent = place;
      ranks.lent.push_back({operation.output});
      operations.push_back(operation);
      ranks[rank].start(operation);
    }
    while (ranks[0].step() || ranks[1].step()) ranks[0].take_wakeups();
    CHECK_EQ(ranks[0].take_ended().size(), std::size_t{1});
    // Rank 1 gets what it lied about; it put nothing into its window, which is all zero.
    CHECK(is_filled(operations[0].output.slice(0, 2 * kCount), 1, 1));
  }
}

TEST("shared pipeline: an operation that one rank gives up passes through, the next is right") {
  constexpr std::uint32_t kRanks = 3;
  Ranks ranks(layout_of(kRanks));
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&ranks, rank] {
      ranks[rank].start(sum(1, kRanks, 5000, 1));
      if (rank == 1) ranks[1].abandon(1);
      const PipelineOperation next = sum(2, kRanks, 5000, 1);
      ranks[rank].start(next);
      const auto ended = run_until(ranks, rank, 2);
      CHECK_EQ(ended.size(), std::size_t{2});
      CHECK(ended[0].abandoned && !ended[1].abandoned);
      CHECK(is_filled(next.output, 3, 3));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST("shared pipeline: in place, with a divisor, in half precision") {
  Ranks ranks(layout_of(2));
  std::vector<PipelineOperation> operations;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    PipelineOperation operation = sum(1, 2, 3000, static_cast<float>(rank));
    operation.output = floats(3000, static_cast<float>(rank));
    operation.inputs = {operation.output};
    operation.divisor = 2;
    operations.push_back(operation);
    PipelineOperation half;
    half.s = 2;
    half.passage = {Kind::reduce_scatter, 0, 2, 2, 1000};
    half.dtype = tensor::DType::bfloat16;
    const MutableBuffer input = HeapAllocator().allocate(4000);
    half.inputs = {input};
    auto* elements = reinterpret_cast<std::uint16_t*>(input.data());
    for (std::size_t i = 0; i < 2000; ++i) {
      elements[i] = float_to_bfloat16(rank == 0 ? 256.0F : 1.0F);  // 257 is 256 or 258 in it
    }
    half.output = HeapAllocator().allocate(2000);
    operations.push_back(half);
    ranks[rank].start(operation);
    ranks[rank].start(half);
  }
  for (bool worked = true; worked;) {
    worked = false;
    for (std::uint32_t rank = 0; rank < 2; ++rank) worked |= ranks[rank].step();
  }
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    CHECK_EQ(ranks[rank].take_ended().size(), std::size_t{2});
    CHECK(is_filled(operations[2 * rank].output, 1, 0.5F));
    const auto* half =
        reinterpret_cast<const std::uint16_t*>(operations[2 * rank + 1].output.data());
    CHECK_EQ(half[999], float_to_bfloat16(257.0F));
  }
}

TEST("shared pipeline: of some ranks only, several inputs each, and zero elements of others") {
  constexpr std::uint64_t kCount = 5000;
  Ranks ranks(layout_of(3));
  std::vector<MutableBuffer> outputs;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    for (std::uint64_t s = 1; s <= 2; ++s) {
      PipelineOperation operation = sum(s, 3, s == 1 ? kCount : 0, 1);
      operation.contributors = std::vector<std::uint32_t>{0, 2};
      operation.divisor = 2;
      if (rank == 1) operation.inputs.clear();
      if (rank == 2) operation.inputs.push_back(floats(s == 1 ? kCount : 0, 3));
      outputs.push_back(operation.output);
      ranks[rank].start(std::move(operation));
    }
  }
  while (ranks[0].step() || ranks[1].step() || ranks[2].step()) {
  }
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    CHECK_EQ(ranks[rank].take_ended().size(), std::size_t{2});
    CHECK(is_filled(outputs[2 * rank], 1.5F, 2.5F));  // (1 + 1 + 3) / 2
  }
}

TEST("shared pipeline: several inputs of one rank are summed in their order") {
  Ranks ranks(layout_of(2));
  const std::vector<float> values{1e8F, 1, -1e8F};
  std::vector<MutableBuffer> outputs;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    PipelineOperation operation = sum(1, 2, 1, 0);
    operation.contributors = std::vector<std::uint32_t>{1};
    operation.inputs.clear();
    for (const float value : values) {
      if (rank == 1) operation.inputs.emplace_back(floats(1, value));
    }
    outputs.push_back(operation.output);
    ranks[rank].start(std::move(operation));
  }
  while (ranks[0].step() || ranks[1].step()) {
  }
  for (const MutableBuffer& output : outputs) CHECK(is_filled(output, 1, 0));
}

TEST("shared pipeline: ranks that started different operations are told so") {
  Ranks ranks(layout_of(2));
  ranks[0].start(sum(1, 2, 5000, 1));
  ranks[1].start(sum(1, 2, 4000, 1));
  try {
    while (ranks[0].step() || ranks[1].step()) {
    }
    CHECK(!"no error");
  } catch (const Exception& e) {
    CHECK(e.error().code == ErrorCode::error);
    CHECK(e.error().message.find("rank 1") != std::string::npos);
  }
}

TEST("shared pipeline: the cause of a wait for a window is the rank that has not taken") {
  constexpr std::uint32_t kRanks = 3;
  Ranks ranks(layout_of(kRanks));
  const auto advance = [&](std::uint32_t rank) {
    while (ranks[rank].step()) {
    }
  };
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) ranks[rank].start(sum(1, kRanks, 3000, 1));
  // Rank 2 stops before it takes the first result.
  for (const std::uint32_t rank : {0, 1, 2, 0, 1}) advance(rank);
  for (const std::uint32_t rank : {0, 1}) ranks[rank].start(sum(2, kRanks, 3000, 1));
  for (const std::uint32_t rank : {0, 1}) advance(rank);
  for (const std::uint32_t rank : {0, 1}) {
    CHECK((ranks[rank].waiting_for() == std::vector<std::uint32_t>{2}));
  }
}

TEST("shared pipeline: processes, of which one is killed in the middle") {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint64_t kCount = 3000;
  Ranks ranks(layout_of(kRanks));
  const auto run = [&ranks](std::uint32_t rank, std::uint64_t last) {
    for (std::uint64_t s = 1; s <= last; ++s) {
      const PipelineOperation operation = sum(s, kRanks, kCount, static_cast<float>(rank));
      ranks[rank].start(operation);
      run_until(ranks, rank, s);
      CHECK(is_filled(operation.output, 3, 3));
    }
  };
  std::vector<pid_t> children;
  for (std::uint32_t rank = 1; rank < kRanks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      run(rank, 1'000'000);
      ::_exit(0);
    }
    children.push_back(child);
  }
  run(0, 200);
  ::kill(children[1], SIGKILL);
  int status = 0;
  CHECK_EQ(::waitpid(children[1], &status, 0), children[1]);
  CHECK(WIFSIGNALED(status));
  // The other two continue as far as they can.
  const PipelineOperation next = sum(201, kRanks, kCount, 0);
  ranks[0].start(next);
  const std::vector<std::uint32_t> the_dead{2};
  const auto ended = [&] { return !ranks[0].take_ended().empty(); };
  bool over = false;
  while (!over && ranks[0].waiting_for() != the_dead) {
    // Rank 1 lives and does its part. The dead one may not have rung for its last store.
    io::ring(ranks.bells[1].rung);
    std::this_thread::yield();
    while (ranks[0].step()) {
      for (const std::uint32_t rank : ranks[0].take_wakeups()) io::ring(ranks.bells[rank].rung);
    }
    over = ended();
  }
  if (over) CHECK(is_filled(next.output, 3, 3));
  ::kill(children[0], SIGKILL);
  CHECK_EQ(::waitpid(children[0], nullptr, 0), children[0]);
}

TEST("shared pipeline: an operation out of order and foreign segments are refused") {
  Ranks ranks(layout_of(2));
  CHECK_THROWS(ranks[0].start(sum(2, 2, 10, 1)), ErrorCode::invalid_argument);
  PipelineLayout other = layout_of(2);
  other.epoch = 8;
  CHECK_THROWS(PipelineSegment(ranks.segment, ranks.segment->bytes(), other), ErrorCode::wire);
  CHECK_THROWS(PipelineSegment::bytes_of(layout_of(100, 64)), ErrorCode::invalid_argument);
}

TEST("shared pipeline: whatever a rank writes, the others stay within memory") {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    Ranks ranks(layout_of(2, 1024));
    for (std::uint64_t s = 1; s <= 4; ++s) {
      ranks[0].start(sum(s, 2, random.below(3000), 1));
      for (int i = 0; i < 30; ++i) {
        // Rank 1 is hostile: its line and its window hold anything.
        for (std::size_t word = 0; word < 8; ++word) {
          const std::uint64_t noise = random.chance(1, 2) ? random.next() : random.below(30);
          std::memcpy(ranks.segment->data() + 128 + 8 * word, &noise, 8);
        }
        try {
          ranks[0].step();
        } catch (const Exception& e) {
          CHECK(e.error().code == ErrorCode::error);  // rank 1 seems to run another operation
        }
        for (const std::uint32_t sleeper : ranks[0].take_wakeups()) CHECK_EQ(sleeper, 1u);
      }
      ranks[0].waiting_for();
      ranks[0].announce_sleep();
      ranks[0].may_sleep();
    }
  }
}

}  // namespace shared_pipeline_test
}  // namespace moolink::collective
