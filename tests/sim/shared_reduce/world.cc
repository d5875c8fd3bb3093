#include "shared_reduce/world.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/buffer.h"
#include "common/program.h"

namespace moolink::sim {

using collective::SharedOperation;
using collective::SharedReduce;

namespace {

constexpr std::uint64_t kMaxElements = 1500;  // above kSmallBytes, so that all ranks have slices

}  // namespace

SharedReduceWorld::SharedReduceWorld(std::uint64_t seed, bool print) : SleepersWorld(seed, print) {
  layout_.epoch = 1 + random_.below(5);
  layout_.ranks = static_cast<std::uint32_t>(1 + random_.below(5));
  layout_.depth = static_cast<std::uint32_t>(1 + random_.below(3));
  layout_.buckets = static_cast<std::uint32_t>(1 + random_.below(3));
  layout_.bytes_per_slot = kMaxElements * sizeof(float);
  deaths_ = random_.chance(1, 2);
  const std::uint64_t bytes = SharedReduce::segment_bytes(layout_);
  const MutableBuffer segment = HeapAllocator().allocate(bytes);
  std::memset(segment.data(), 0, bytes);
  memory_ = segment.owner();
  SharedReduce::initialise(segment.span(), layout_);
  ranks_.resize(layout_.ranks);
  for (std::uint32_t i = 0; i < layout_.ranks; ++i) {
    ranks_[i].reduce = std::make_unique<SharedReduce>(memory_, segment.span(), layout_, i);
    ranks_[i].bucket_used_by.resize(layout_.buckets);
  }
  make_operations();
}

void SharedReduceWorld::make_operations() {
  const std::uint64_t count = 3 + random_.below(8);
  for (std::uint64_t s = 1; s <= count; ++s) {
    Operation operation;
    SharedOperation& specification = operation.specification;
    specification.s = s;
    // Two sections, so that there are slices of both; either may be small or empty.
    const std::uint64_t first = random_.chance(1, 4) ? random_.below(20) : random_.below(1300);
    const std::uint64_t second = random_.below(kMaxElements - first);
    specification.sections = {{tensor::DType::float32, 0, first},
                              {tensor::DType::float32, 4 * first, second}};
    for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
      if (random_.chance(2, 3)) specification.contributors.push_back(rank);
      if (random_.chance(3, 4)) specification.reducers.push_back(rank);
    }
    if (specification.reducers.empty()) specification.reducers.push_back(0);
    specification.whole = random_.chance(1, 3);
    if (specification.whole) specification.reducers.clear();
    specification.divisor = random_.chance(1, 2) ? 1 : 3;
    operations_.push_back(std::move(operation));
  }
}

void SharedReduceWorld::run() {
  const std::uint64_t limit = 200000;
  while (!finished()) {
    require(++ticks_ < limit, "the run does not come to an end");
    require(!stuck(), "all ranks sleep, and none will be rung");
    act(static_cast<std::uint32_t>(random_.below(layout_.ranks)));
  }
  check_the_end();
}

void SharedReduceWorld::act(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (rank.dead) return;
  if (deaths_ && random_.chance(1, 400)) return kill(index);
  if (rank.sleep == Sleep::asleep) {
    // A message wakes it too, the news of an operation, and a user who is done with a result.
    const bool user = can_start(rank) || rank.released < rank.verified;
    if (!rank.rung && !(user && random_.chance(1, 10))) return;
    rank.wake(*rank.reduce);
    return;
  }
  if (rank.sleep == Sleep::announced) return rank.look_once_more(*rank.reduce);
  switch (random_.below(5)) {
    case 0:
      start_next(index);
      break;
    case 1:
      look_at_results(index);
      break;
    case 2:
      release_one(index);
      break;
    case 3:
      if (!ring_next(ranks_, rank) && fall_asleep(index)) break;
      [[fallthrough]];
    default:
      if (!ring_next(ranks_, rank)) step(index);
  }
}

bool SharedReduceWorld::can_start(const Rank& rank) const {
  return rank.started < operations_.size();
}

bool SharedReduceWorld::start_next(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (!can_start(rank)) return false;
  Operation& operation = operations_[rank.started];
  const std::uint64_t s = operation.specification.s;
  const auto& contributors = operation.specification.contributors;
  std::vector<std::uint32_t> buckets;
  if (std::binary_search(contributors.begin(), contributors.end(), index)) {
    for (std::uint32_t bucket = 0; bucket < layout_.buckets; ++bucket) {
      const bool free = rank.bucket_used_by[bucket] <= rank.reduce->completed();
      if (free && (buckets.empty() || random_.chance(1, 3))) buckets.push_back(bucket);
    }
    if (buckets.empty()) return false;
  }
  for (const std::uint32_t bucket : buckets) {
    rank.bucket_used_by[bucket] = s;
    auto* input = reinterpret_cast<float*>(rank.reduce->input(bucket).data());
    for (std::uint64_t i = 0; i < operation.elements(); ++i) {
      input[i] = value(index, s, bucket, i);
    }
  }
  operation.buckets[index] = buckets;
  if (operation.specification.whole) {
    const MutableBuffer own = HeapAllocator().allocate(layout_.bytes_per_slot);
    rank.own[s] = own;
    rank.reduce->start(operation.specification, buckets, own);
  } else {
    rank.reduce->start(operation.specification, buckets);
  }
  rank.started = s;
  if (s > rank.reduce->completed() + layout_.depth) ++coverage["started early"];
  note(index, "start", s);
  return true;
}

void SharedReduceWorld::step(std::uint32_t index) {
  Rank& rank = ranks_[index];
  const bool worked = rank.reduce->step();
  rank.take_wakeups(*rank.reduce);
  note(index, worked ? "step" : "wait", rank.reduce->completed());
}

bool SharedReduceWorld::fall_asleep(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (has_next(rank)) return false;  // the user is told first
  const bool waits = rank.reduce->announce_sleep();
  if (!waits && can_start(rank)) return false;
  // Waiting for nobody, only a message or the end of the run concerns it.
  rank.sleep = waits ? Sleep::announced : Sleep::awake;
  note(index, "sleeps", waits ? 1 : 0);
  return waits;
}

// The result of a whole operation is there as soon as this rank has reduced it.
bool SharedReduceWorld::has_next(const Rank& rank) const {
  const std::uint64_t next = rank.verified + 1;
  if (next > operations_.size()) return false;
  const bool whole = operations_[next - 1].specification.whole;
  return next <= (whole ? rank.reduce->reduced() : rank.reduce->completed());
}

void SharedReduceWorld::look_at_results(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (!has_next(rank)) return;
  check_result(index, ++rank.verified);
  note(index, "has", rank.verified);
}

void SharedReduceWorld::release_one(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (rank.released == rank.verified) return;
  check_result(index, rank.released + 1);  // unchanged since it was complete
  rank.reduce->release(++rank.released);
  rank.own.erase(rank.released);
  note(index, "release", rank.released);
}

void SharedReduceWorld::kill(std::uint32_t index) {
  Rank& dead = ranks_[index];
  SleepersWorld::kill(dead);
  ++coverage[dead.reduce->completed() < dead.started ? "died in an operation" : "died idle"];
  note(index, "dies", dead.reduce->completed());
}

float SharedReduceWorld::value(std::uint32_t rank, std::uint64_t s, std::uint32_t bucket,
                               std::uint64_t i) const {
  // Of very different sizes, so that another order of summation gives other bits.
  Random random(seed_ ^ (s << 40) ^ (std::uint64_t{rank} << 32) ^ (bucket << 24) ^ i);
  const auto mantissa = static_cast<float>(static_cast<std::int64_t>(random.below(2000)) - 1000);
  return mantissa * (random.chance(1, 2) ? 1e-4F : 1e3F);
}

std::vector<float> SharedReduceWorld::expected(std::uint64_t s) const {
  const Operation& operation = operations_[s - 1];
  std::vector<float> sum(operation.elements(), 0.0F);
  bool first = true;
  for (const std::uint32_t rank : operation.specification.contributors) {
    require(operation.buckets.contains(rank), "complete before its contributors started");
    for (const std::uint32_t bucket : operation.buckets.at(rank)) {
      for (std::uint64_t i = 0; i < sum.size(); ++i) {
        const float element = value(rank, s, bucket, i);
        sum[i] = first ? element : sum[i] + element;
      }
      first = false;
    }
  }
  if (first) return sum;
  for (float& element : sum) element /= static_cast<float>(operation.specification.divisor);
  return sum;
}

void SharedReduceWorld::check_result(std::uint32_t index, std::uint64_t s) {
  const std::vector<float> sum = expected(s);
  const bool whole = operations_[s - 1].specification.whole;
  const Buffer result = whole ? Buffer(ranks_[index].own.at(s)) : ranks_[index].reduce->result(s);
  const bool equal = sum.empty() || std::memcmp(result.data(), sum.data(), 4 * sum.size()) == 0;
  require(equal, "rank " + std::to_string(index) + " has a wrong result of operation " +
                     std::to_string(s));
  ++coverage[operations_[s - 1].specification.contributors.empty() ? "zeros" : "results"];
}

bool SharedReduceWorld::finished() const {
  const auto rank_finished = [&](const Rank& rank) {
    return rank.dead || rank.released == operations_.size();
  };
  if (std::all_of(ranks_.begin(), ranks_.end(), rank_finished)) return true;
  return proven();  // the survivors stop where they are
}

bool SharedReduceWorld::stuck() const {
  for (const Rank& rank : ranks_) {
    if (rank.dead) return false;  // the proof of it wakes the sleepers
    if (rank.sleep != Sleep::asleep || rank.rung) return false;
    if (can_start(rank) || rank.released < rank.verified) return false;
  }
  return true;
}

// What the survivors of an epoch rely on when they agree on the last round that somebody has.
void SharedReduceWorld::check_the_end() {
  std::optional<std::uint64_t> common;
  for (std::uint32_t i = 0; i < layout_.ranks; ++i) {
    Rank& rank = ranks_[i];
    if (rank.dead) continue;
    const std::uint64_t completed = rank.reduce->completed();
    require(!common || *common == completed, "survivors differ in what is complete");
    common = completed;
    for (std::uint64_t s = completed + 1; s <= rank.released; ++s) {
      require(operations_[s - 1].specification.whole, "released before it was complete");
      ++coverage["whole, and not at all"];
    }
    for (std::uint64_t s = rank.released + 1; s <= completed; ++s) check_result(i, s);
    if (completed > rank.released) ++coverage["results kept at the end"];
    trace_.add(completed);
  }
  if (common) wake_the_stopped(*common);
}

// They find what the others left, may end an operation on it, and must tell nobody.
void SharedReduceWorld::wake_the_stopped(std::uint64_t completed) {
  for (Rank& rank : ranks_) {
    if (!rank.dead) rank.reduce->give_up();
  }
  for (std::uint32_t i = 0; i < layout_.ranks; ++i) {
    Rank& rank = ranks_[i];
    if (!rank.stopped) continue;
    while (rank.reduce->step()) ++ticks_;
    const bool beyond = rank.reduce->completed() > completed;
    if (beyond) ++coverage["ended by one that woke"];
    require(!beyond || rank.reduce->given_up(),
            "a rank that was stopped tells of an operation that the others have given up");
  }
}

}  // namespace moolink::sim
