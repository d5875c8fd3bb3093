#include "collective/shared_reduce.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/random.h"
#include "check.h"
#include "edges.h"
#include "io/doorbell.h"
#include "memory/segment.h"

namespace moolink::collective {
namespace shared_reduce_test {

using tensor::DType;

SharedLayout layout_of(std::uint32_t ranks, std::uint64_t bytes) { return {7, ranks, 2, 2, bytes}; }

// All ranks in one process, through one mapping.
struct Ranks {
  explicit Ranks(const SharedLayout& layout)
      : segment(memory::Segment::create(SharedReduce::segment_bytes(layout), "moolink-test")) {
    SharedReduce::initialise(segment->bytes(), layout);
    for (std::uint32_t rank = 0; rank < layout.ranks; ++rank) {
      reduces.push_back(std::make_unique<SharedReduce>(segment, segment->bytes(), layout, rank));
    }
  }
  SharedReduce& operator[](std::size_t rank) { return *reduces[rank]; }
  void settle() {
    bool again = true;
    while (again) {
      again = false;
      for (auto& reduce : reduces) again |= reduce->step();
    }
  }

  std::shared_ptr<memory::Segment> segment;
  std::vector<std::unique_ptr<SharedReduce>> reduces;
};

SharedOperation operation(std::uint64_t s, std::uint32_t ranks, std::uint64_t count) {
  SharedOperation made;
  made.s = s;
  made.sections = {{DType::float32, 0, count}};
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    made.contributors.push_back(rank);
    made.reducers.push_back(rank);
  }
  return made;
}

float value(std::uint32_t rank, std::uint64_t s, std::uint64_t i) {
  Random random(s << 40 ^ std::uint64_t{rank} << 32 ^ i);
  return static_cast<float>(random.below(1000)) * (random.chance(1, 2) ? 1e-4F : 1e3F);
}

void put(SharedReduce& reduce, std::uint32_t bucket, std::uint64_t s, std::uint64_t count) {
  auto* input = reinterpret_cast<float*>(reduce.input(bucket).data());
  for (std::uint64_t i = 0; i < count; ++i) input[i] = value(reduce.rank(), s, i);
}

bool is_sum(const Buffer& result, std::uint32_t ranks, std::uint64_t s, std::uint64_t count) {
  const auto* got = reinterpret_cast<const float*>(result.data());
  for (std::uint64_t i = 0; i < count; ++i) {
    float sum = value(0, s, i);
    for (std::uint32_t rank = 1; rank < ranks; ++rank) sum += value(rank, s, i);
    if (std::memcmp(&got[i], &sum, sizeof sum) != 0) return false;
  }
  return true;
}

TEST("shared reduce: every rank has the sum of the contributors, divided once") {
  Ranks ranks(layout_of(3, 100000));
  for (const std::uint64_t count : {25000, 1, 1025}) {
    const std::uint64_t s = ranks[0].completed() + 1;
    SharedOperation wanted = operation(s, 3, count);
    wanted.contributors = {0, 2};
    wanted.divisor = 2;
    for (const std::uint32_t rank : {0U, 1U, 2U}) put(ranks[rank], 1, s, count);
    ranks[0].start(wanted, {1});
    ranks[1].start(wanted, {});
    ranks[2].start(wanted, {1});
    ranks.settle();
    for (const std::uint32_t rank : {0U, 1U, 2U}) {
      CHECK_EQ(ranks[rank].completed(), s);
      const Buffer result = ranks[rank].result(s);
      const auto* got = reinterpret_cast<const float*>(result.data());
      for (std::uint64_t i = 0; i < count; ++i) {
        CHECK_EQ(got[i], (value(0, s, i) + value(2, s, i)) / 2);
      }
      ranks[rank].release(s);
    }
    ranks.settle();
  }
}

TEST("shared reduce: of a whole operation every rank has the result in its own memory") {
  Ranks ranks(layout_of(2, 100000));
  for (const std::uint64_t s : {1, 2, 3, 4, 5}) {
    SharedOperation wanted = operation(s, 2, 25000);
    wanted.whole = true;
    wanted.reducers.clear();
    std::array<MutableBuffer, 2> own;
    for (const std::uint32_t rank : {0U, 1U}) {
      put(ranks[rank], 0, s, 25000);
      own[rank] = HeapAllocator().allocate(100000);
      ranks[rank].start(wanted, {0}, own[rank]);
    }
    ranks.settle();
    for (const std::uint32_t rank : {0U, 1U}) {
      CHECK_EQ(ranks[rank].reduced(), s);
      CHECK(is_sum(own[rank], 2, s, 25000));
      ranks[rank].release(s);
    }
    ranks.settle();
  }
  SharedOperation wanted = operation(6, 2, 1);
  wanted.whole = true;
  CHECK_THROWS(ranks[0].start(wanted, {0}, HeapAllocator().allocate(100000)),
               ErrorCode::invalid_argument);  // with reducers
  wanted.reducers.clear();
  CHECK_THROWS(ranks[0].start(wanted, {0}), ErrorCode::invalid_argument);  // without memory
}

TEST("shared reduce: several inputs of one rank are summed in the order of its buckets") {
  Ranks ranks(layout_of(2, 8));
  SharedOperation wanted = operation(1, 2, 1);
  wanted.contributors = {1};
  const std::array<float, 2> inputs{1e8F, -1e8F};
  for (const std::uint32_t bucket : {0U, 1U}) {
    std::memcpy(ranks[1].input(bucket).data(), &inputs[bucket], sizeof(float));
  }
  ranks[0].start(wanted, {});
  ranks[1].start(wanted, {0, 1});
  ranks.settle();
  CHECK_EQ(*reinterpret_cast<const float*>(ranks[0].result(1).data()), 0.0F);
}

TEST("shared reduce: sections of several types, each in its own arithmetic") {
  Ranks ranks(layout_of(2, 1 << 20));
  SharedOperation wanted;
  wanted.s = 1;
  wanted.contributors = wanted.reducers = {0, 1};
  wanted.sections = {{DType::float64, 0, 50000},
                     {DType::int32, 400000, 3},
                     {DType::int8, 400064, 0},
                     {DType::int32, 500000, 100000}};
  for (const std::uint32_t rank : {0U, 1U}) {
    auto* input = ranks[rank].input(0).data();
    for (const SharedSection& section : wanted.sections) {
      for (std::uint64_t i = 0; i < section.count; ++i) {
        const auto number = static_cast<std::int32_t>(i * 3 + rank);
        const double real = number;
        std::byte* at = input + section.offset + i * tensor::item_size(section.dtype);
        if (section.dtype == DType::float64) std::memcpy(at, &real, sizeof real);
        if (section.dtype == DType::int32) std::memcpy(at, &number, sizeof number);
      }
    }
    ranks[rank].start(wanted, {0});
  }
  ranks.settle();
  const Buffer result = ranks[1].result(1);
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const auto sum = static_cast<std::int32_t>(i * 6 + 1);
    std::int32_t number = 0;
    std::memcpy(&number, result.data() + 500000 + 4 * i, sizeof number);
    CHECK_EQ(number, sum);
    double real = 0;
    if (i < 50000) {
      std::memcpy(&real, result.data() + 8 * i, sizeof real);
      CHECK_EQ(real, static_cast<double>(sum));
    }
  }
}

TEST("shared reduce: it waits for the rank that is late, and says which") {
  Ranks ranks(layout_of(3, 100));
  CHECK(ranks[0].waiting_for().empty());
  ranks[0].start(operation(1, 3, 10), {0});
  ranks[1].start(operation(1, 3, 10), {0});
  ranks.settle();
  CHECK_EQ(ranks[0].completed(), 0u);
  CHECK(ranks[1].waiting_for() == std::vector<std::uint32_t>{2});
  CHECK_THROWS(ranks[0].result(1), ErrorCode::invalid_argument);
  CHECK_THROWS(ranks[0].release(1), ErrorCode::invalid_argument);
}

TEST("shared reduce: a result that somebody needs holds the slot, and is named") {
  Ranks ranks(layout_of(2, 100));
  for (std::uint64_t s = 1; s <= 3; ++s) {
    for (const std::uint32_t rank : {0U, 1U}) {
      put(ranks[rank], s % 2, s, 10);
      ranks[rank].start(operation(s, 2, 10), {static_cast<std::uint32_t>(s % 2)});
    }
    ranks.settle();
    if (s <= 2) ranks[0].release(s);
  }
  CHECK_EQ(ranks[0].completed(), 2u);
  CHECK(ranks[0].waiting_for() == std::vector<std::uint32_t>{1});
  CHECK(is_sum(ranks[1].result(1), 2, 1, 10));
  ranks[1].release(1);
  ranks.settle();
  CHECK_EQ(ranks[0].completed(), 3u);
  CHECK(is_sum(ranks[0].result(3), 2, 3, 10));
}

TEST("shared reduce: what cannot be run is refused") {
  CHECK_THROWS(SharedReduce::segment_bytes(layout_of(0, 10)), ErrorCode::invalid_argument);
  CHECK_THROWS(SharedReduce::segment_bytes(layout_of(kMaxSharedRanks + 1, 10)),
               ErrorCode::invalid_argument);
  CHECK_THROWS(SharedReduce::segment_bytes(layout_of(2, ~std::uint64_t{0})),
               ErrorCode::invalid_argument);
  Ranks ranks(layout_of(2, 40));
  const auto refused = [&](const SharedOperation& wanted, std::vector<std::uint32_t> buckets) {
    CHECK_THROWS(ranks[0].start(wanted, buckets), ErrorCode::invalid_argument);
  };
  refused(operation(2, 2, 10), {0});  // not the next one
  refused(operation(1, 2, 11), {0});  // too large
  refused(operation(1, 3, 10), {0});  // no such rank
  refused(operation(1, 2, 10), {});   // a contributor without input
  refused(operation(1, 2, 10), {2});  // no such bucket
  refused(operation(1, 2, 10), {1, 0});
  SharedOperation wanted = operation(1, 2, 10);
  wanted.contributors = {1};
  refused(wanted, {0});
  wanted.reducers = {};
  refused(wanted, {});
  SharedOperation shifted = operation(1, 2, 10);
  shifted.sections[0].offset = 4;
  refused(shifted, {0});
  shifted.sections[0] = {DType::float32, 2, 1};
  refused(shifted, {0});
  shifted.sections[0] = {DType::float32, ~std::uint64_t{0} - 3, 1};
  refused(shifted, {0});
  SharedOperation bits = operation(1, 2, 10);
  bits.op = ReduceOp::bit_and;
  refused(bits, {0});
  CHECK_THROWS(ranks[0].input(2), ErrorCode::invalid_argument);
}

TEST("shared reduce: a segment of another epoch or layout is refused") {
  const SharedLayout layout = layout_of(2, 40);
  Ranks ranks(layout);
  const auto refused = [&](SharedLayout other) {
    CHECK_THROWS(SharedReduce(ranks.segment, ranks.segment->bytes(), other, 0), ErrorCode::wire);
  };
  SharedLayout other = layout;
  other.epoch += 1;
  refused(other);
  other = layout;
  other.ranks += 1;
  refused(other);
  other = layout;
  other.bytes_per_slot += 4;
  refused(other);
  CHECK_THROWS(SharedReduce(ranks.segment, ranks.segment->bytes().first(100), layout, 0),
               ErrorCode::wire);
  CHECK_THROWS(SharedReduce(ranks.segment, ranks.segment->bytes(), layout, 2),
               ErrorCode::invalid_argument);
}

TEST("shared reduce: ranks that started different operations are told so") {
  Ranks ranks(layout_of(2, 40));
  ranks[0].start(operation(1, 2, 10), {0});
  ranks[1].start(operation(1, 2, 9), {0});
  CHECK(ranks[1].step());  // announces
  try {
    ranks.settle();
    CHECK(!"no error");
  } catch (const Exception& e) {
    CHECK(e.error().code == ErrorCode::error);
    CHECK(e.error().message.find("rank 1") != std::string::npos);
  }
}

TEST("shared reduce: whatever a rank writes, the others stay within the segment") {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const SharedLayout layout = layout_of(2, 6000);
    Ranks ranks(layout);
    for (std::uint64_t s = 1; s <= 4; ++s) {
      ranks[0].start(operation(s, 2, 1500), {static_cast<std::uint32_t>(s % 2)});
      // Rank 1 is hostile: its line and its announcements hold anything.
      for (std::size_t word = 0; word < 4; ++word) {
        const std::uint64_t noise = random.chance(1, 2) ? random.next() : random.below(6);
        std::memcpy(ranks.segment->data() + 128 + 8 * word, &noise, 8);
        const std::uint64_t more = random.chance(1, 2) ? random.next() : random.below(4);
        std::memcpy(ranks.segment->data() + 256 + 8 * word, &more, 8);
      }
      try {
        for (int i = 0; i < 20 && ranks[0].step(); ++i) {
        }
        CHECK(ranks[0].completed() <= s);
        ranks[0].release(ranks[0].completed());
      } catch (const Exception& e) {
        CHECK(e.error().code == ErrorCode::error);
        break;
      }
      ranks[0].take_wakeups();
      ranks[0].waiting_for();
    }
  }
}

// --- with doorbells

void step_and_ring(SharedReduce& reduce, const std::vector<io::Doorbell>& bells) {
  while (reduce.step()) {
    for (const std::uint32_t rank : reduce.take_wakeups()) io::ring(bells[rank].rung);
  }
}

// Runs operations 1 .. last, sleeping whenever there is nothing to do.
void run_rank(SharedReduce& reduce, const std::vector<io::Doorbell>& bells, std::uint64_t last,
              std::uint64_t count) {
  const std::uint32_t ranks = reduce.layout().ranks;
  check::Edges edges(bells[reduce.rank()].watched.get());
  for (std::uint64_t s = 1; s <= last; ++s) {
    const auto bucket = static_cast<std::uint32_t>(s % 2);
    put(reduce, bucket, s, count);
    reduce.start(operation(s, ranks, count), {bucket});
    while (true) {
      step_and_ring(reduce, bells);
      if (reduce.completed() >= s) break;
      if (reduce.announce_sleep() && reduce.may_sleep()) CHECK(edges.next(20000));
      reduce.awake();
    }
    CHECK(is_sum(reduce.result(s), ranks, s, count));
    reduce.release(s);
  }
  step_and_ring(reduce, bells);
}

std::vector<io::Doorbell> make_bells(std::uint32_t ranks) {
  std::vector<io::Doorbell> bells;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) bells.push_back(io::make_doorbell());
  return bells;
}

TEST("shared reduce: threads that sleep whenever they must") {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint64_t kOperations = 300;
  Ranks ranks(layout_of(kRanks, 4 * 2000));
  const auto bells = make_bells(kRanks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { run_rank(ranks[rank], bells, kOperations, 2000); });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    CHECK_EQ(ranks[rank].completed(), kOperations);
  }
}

TEST("shared reduce: processes, of which one is killed in the middle") {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint64_t kCount = 3000;
  Ranks ranks(layout_of(kRanks, 4 * kCount));
  const auto bells = make_bells(kRanks);
  std::vector<pid_t> children;
  for (std::uint32_t rank = 1; rank < kRanks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      run_rank(ranks[rank], bells, 1'000'000, kCount);
      ::_exit(0);
    }
    children.push_back(child);
  }
  run_rank(ranks[0], bells, 200, kCount);
  ::kill(children[1], SIGKILL);
  int status = 0;
  CHECK_EQ(::waitpid(children[1], &status, 0), children[1]);
  CHECK(WIFSIGNALED(status));
  // The other two come as far as they can; nothing more is complete afterwards.
  const std::uint64_t s = 201;
  put(ranks[0], s % 2, s, kCount);
  ranks[0].start(operation(s, kRanks, kCount), {static_cast<std::uint32_t>(s % 2)});
  step_and_ring(ranks[0], bells);
  const std::vector<std::uint32_t> the_dead{2};
  while (ranks[0].completed() < s && ranks[0].waiting_for() != the_dead) {
    std::this_thread::yield();  // rank 1 lives and does its part
    step_and_ring(ranks[0], bells);
  }
  const std::uint64_t completed = ranks[0].completed();
  if (completed == s) CHECK(is_sum(ranks[0].result(s), kRanks, s, kCount));
  ::kill(children[0], SIGKILL);
  CHECK_EQ(::waitpid(children[0], nullptr, 0), children[0]);
}

}  // namespace shared_reduce_test
}  // namespace moolink::collective
