#include "shared_pipeline/world.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/buffer.h"
#include "common/program.h"

namespace moolink::sim {

using collective::Kind;
using collective::Passage;
using collective::PipelineOperation;
using collective::PipelineSegment;
using collective::SharedPipeline;

namespace {

constexpr std::uint64_t kMaxElements = 700;

MutableBuffer buffer_of(const std::vector<float>& values) {
  MutableBuffer buffer = HeapAllocator().allocate(4 * values.size());
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), buffer.size());
  return buffer;
}

bool is_large(const Passage& passage, std::uint64_t window_bytes) {
  return collective::chunks_of(passage, window_bytes) > 1;
}

}  // namespace

SharedPipelineWorld::SharedPipelineWorld(std::uint64_t seed, bool print)
    : SleepersWorld(seed, print) {
  layout_.epoch = 1 + random_.below(5);
  layout_.ranks = static_cast<std::uint32_t>(1 + random_.below(5));
  layout_.depth = static_cast<std::uint32_t>(1 + random_.below(3));
  layout_.window_bytes = 64 * (layout_.ranks + random_.below(8));  // several chunks
  deaths_ = random_.chance(1, 3);
  gives_up_ = random_.chance(1, 3);
  const std::uint64_t bytes = PipelineSegment::bytes_of(layout_);
  const MutableBuffer segment = HeapAllocator().allocate(bytes);
  std::memset(segment.data(), 0, bytes);
  memory_ = segment.owner();
  PipelineSegment::initialise(segment.span(), layout_);
  ranks_.resize(layout_.ranks);
  for (std::uint32_t i = 0; i < layout_.ranks; ++i) {
    ranks_[i].pipeline = std::make_unique<SharedPipeline>(
        PipelineSegment(memory_, segment.span(), layout_), i, heap_,
        [this](std::uint32_t rank, std::uint64_t number) {
          return std::make_shared<const std::span<const std::byte>>(lent(rank, number));
        });
  }
  make_operations();
}

void SharedPipelineWorld::make_operations() {
  const std::uint64_t count = 3 + random_.below(8);
  for (std::uint64_t s = 1; s <= count; ++s) {
    PipelineOperation operation;
    operation.s = s;
    operation.dtype = tensor::DType::float32;
    // Mostly the one whose ranks depend on one another in every stage.
    const auto kind = random_.chance(1, 2) ? Kind::all_reduce : static_cast<Kind>(random_.below(6));
    operation.passage = {kind, static_cast<std::uint32_t>(random_.below(layout_.ranks)),
                         layout_.ranks, 4,
                         random_.chance(1, 4) ? random_.below(20) : random_.below(kMaxElements)};
    operation.divisor = random_.chance(1, 2) ? 1 : 3;
    Operation made{operation, false, std::vector<std::uint64_t>(layout_.ranks, 1)};
    if (kind == Kind::all_reduce && random_.chance(1, 2)) {
      made.specification.exchanged = true;
      made.specification.divisor = 1;
      made.specification.passage.owners =
          static_cast<std::uint32_t>(random_.below(layout_.ranks + 1));
      ++coverage["exchanged"];
    }
    if (collective::reduces(kind) && random_.chance(1, 2)) {
      std::vector<std::uint32_t> contributors;
      for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
        if (random_.chance(2, 3)) contributors.push_back(rank);
        made.inputs[rank] = 1 + random_.below(3);
      }
      if (contributors.empty() && made.specification.exchanged) ++coverage["exchanged zeros"];
      if (contributors.size() < layout_.ranks && !contributors.empty()) ++coverage["of some ranks"];
      if (!contributors.empty() || made.specification.exchanged) {
        made.specification.contributors = std::move(contributors);
      }
    }
    operations_.push_back(std::move(made));
  }
}

void SharedPipelineWorld::run() {
  const std::uint64_t limit = 400000;
  while (!finished()) {
    require(++ticks_ < limit, "the run does not come to an end");
    require(!stuck(), "all ranks sleep, and none will be rung");
    act(static_cast<std::uint32_t>(random_.below(layout_.ranks)));
  }
  wake_the_stopped();
}

void SharedPipelineWorld::act(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (random_.chance(1, 4) && exchange_one()) return;
  if (rank.dead) return;
  if (!rank.unwritten.empty() && random_.chance(1, 6)) return write_on(index);
  const bool lends = rank.started > rank.ended && !rank.lent[rank.ended].empty();
  if (deaths_ && random_.chance(1, lends ? 100 : 400)) return kill(index);
  if (rank.sleep == Sleep::asleep) {
    // A message wakes it too, the news of an operation.
    const bool message = rank.started < operations_.size() && random_.chance(1, 10);
    if (!rank.rung && !message) return;
    rank.wake(*rank.pipeline);
    if (message) start_next(index);
    return;
  }
  if (rank.sleep == Sleep::announced) return rank.look_once_more(*rank.pipeline);
  if (gives_up_ && random_.chance(1, 150)) return abandon_one(index);
  switch (random_.below(5)) {
    case 0:
      start_next(index);
      break;
    case 1:
      if (!ring_next(ranks_, rank) && fall_asleep(index)) break;
      [[fallthrough]];
    default:
      if (!ring_next(ranks_, rank)) step(index);
  }
}

bool SharedPipelineWorld::start_next(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (rank.started == operations_.size()) return false;
  PipelineOperation operation = operations_[rank.started].specification;
  const std::uint64_t s = operation.s;
  const Passage& passage = operation.passage;
  std::vector<MutableBuffer> inputs;
  for (std::uint64_t number = 0; number < inputs_of(index, s); ++number) {
    inputs.push_back(buffer_of(input(index, operation, number)));
    operation.inputs.push_back(inputs.back());
  }
  const MutableBuffer own = inputs.empty() ? MutableBuffer() : inputs.back();
  const bool single = passage.kind == Kind::all_reduce && operation.inputs.size() == 1;
  if (operation.inputs.size() > 1) ++coverage["several inputs"];
  const bool in_place = single && random_.chance(1, 3);
  const MutableBuffer output =
      in_place ? own : HeapAllocator().allocate(collective::output_bytes(passage, index));
  if (gives_up_ && random_.chance(1, 20)) {  // cancelled before it heard that it goes
    operation.abandoned = true;
    operation.inputs.clear();
    operations_[s - 1].abandoned = true;
    rank.given_up.push_back(s);
  }
  operation.output = operation.abandoned ? MutableBuffer() : output;
  const bool unwritten = passage.kind == Kind::all_reduce && !operation.abandoned && !in_place;
  if (unwritten && random_.chance(1, 3)) leave_unwritten(rank, operation, inputs);
  const bool lends = single && random_.chance(1, 2);
  if (lends) {
    operation.lent = {s, 0};
    ++coverage[in_place ? "lent, in place" : "lent, the input"];
  }
  rank.lent.push_back(lends ? own : MutableBuffer());
  rank.outputs.push_back(output);
  rank.pipeline->start(std::move(operation));
  rank.started = s;
  if (s > rank.ended + 1) ++coverage["started early"];
  if (is_large(passage, layout_.window_bytes)) ++coverage["of several chunks"];
  ++coverage[collective::kind_name(passage.kind)];
  note(index, "start", s);
  return true;
}

void SharedPipelineWorld::leave_unwritten(Rank& rank, PipelineOperation& operation,
                                          const std::vector<MutableBuffer>& inputs) {
  for (const MutableBuffer& memory : inputs) {
    if (memory.empty()) continue;
    const MutableBuffer content = HeapAllocator().allocate(memory.size());
    std::memcpy(content.data(), memory.data(), memory.size());
    std::memset(memory.data(), 0x5b, memory.size());
    rank.unwritten.push_back({operation.s, memory, content, std::make_shared<Progress>()});
    operation.written.buffers.push_back(rank.unwritten.back().progress);
    ++coverage["unwritten inputs"];
  }
}

// Writes some more of an input, which wakes the rank.
void SharedPipelineWorld::write_on(std::uint32_t index) {
  Rank& rank = ranks_[index];
  const std::size_t chosen = random_.below(rank.unwritten.size());
  const Unwritten& one = rank.unwritten[chosen];
  const std::uint64_t from = one.progress->bytes();
  const std::uint64_t bytes = 1 + random_.below(one.memory.size() - from);
  std::memcpy(one.memory.data() + from, one.content.data() + from, bytes);
  one.progress->reach(from + bytes);
  note(index, "writes more of its input", one.s);
  if (from + bytes == one.memory.size()) {
    rank.unwritten.erase(rank.unwritten.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  if (rank.sleep == Sleep::asleep) rank.wake(*rank.pipeline);
}

void SharedPipelineWorld::step(std::uint32_t index) {
  Rank& rank = ranks_[index];
  const bool worked = rank.pipeline->step();
  rank.take_wakeups(*rank.pipeline);
  note(index, worked ? "step" : "wait", rank.ended);
  take_sums(index);
  take_ended(index, false);
}

void SharedPipelineWorld::take_sums(std::uint32_t index) {
  for (SharedPipeline::Sum& sum : ranks_[index].pipeline->take_sums()) {
    exchanged_.push_back({index, std::move(sum)});
  }
}

// One sum comes back from other hosts, which have added theirs; or, if some rank has abandoned the
// operation, the news of that. False: there is none.
bool SharedPipelineWorld::exchange_one() {
  if (exchanged_.empty()) return false;
  const auto at =
      exchanged_.begin() + static_cast<std::ptrdiff_t>(random_.below(exchanged_.size()));
  const Exchanged taken = std::move(*at);
  exchanged_.erase(at);
  Rank& rank = ranks_[taken.rank];
  if (rank.dead) return true;
  const std::uint64_t s = taken.sum.s;
  const Operation& operation = operations_[s - 1];
  if (rank.sleep == Sleep::asleep) rank.wake(*rank.pipeline);
  if (operation.abandoned && random_.chance(1, 2)) {
    abandon(taken.rank, s);
    ++coverage["abandoned while it is exchanged"];
    return true;
  }
  const Passage& passage = operation.specification.passage;
  const std::uint64_t begin =
      collective::chunk_plan(passage, layout_.window_bytes, taken.rank, taken.sum.chunk)
          .reduced.user /
      4;
  std::vector<float> values(taken.sum.elements.size() / 4);
  std::memcpy(values.data(), taken.sum.elements.data(), taken.sum.elements.size());
  for (std::uint64_t i = 0; i < values.size(); ++i) {
    require(values[i] == sum_here(s, begin + i),
            "rank " + std::to_string(taken.rank) + " gives other hosts a wrong sum of operation " +
                std::to_string(s));
    values[i] += theirs(s, begin + i);
  }
  rank.pipeline->publish(s, taken.sum.chunk, buffer_of(values));
  note(taken.rank, "is told the sum of all hosts", s);
  return true;
}

float SharedPipelineWorld::theirs(std::uint64_t s, std::uint64_t i) const {
  return value(layout_.ranks, s, i);
}

void SharedPipelineWorld::take_ended(std::uint32_t index, bool woken) {
  Rank& rank = ranks_[index];
  for (const SharedPipeline::Ended& ended : rank.pipeline->take_ended()) {
    require(ended.s == rank.ended + 1, "operations end out of order");
    rank.ended = ended.s;
    note(index, ended.abandoned ? "ends without a result" : "ends", ended.s);
    const bool own =
        std::find(rank.given_up.begin(), rank.given_up.end(), ended.s) != rank.given_up.end();
    require(!own || ended.abandoned, "an operation that was given up here has a result here");
    require(!ended.abandoned || operations_[ended.s - 1].abandoned, "an end without a result");
    if (ended.abandoned) {
      ++coverage["abandoned"];
      continue;
    }
    if (woken) {
      ++coverage["ended by one that woke"];
      require(rank.pipeline->given_up(),
              "a rank that was stopped tells of an operation that the others have given up");
    }
    check_result(index, ended.s);
    spoil(index, ended.s);
  }
}

// What a rank lends of operation s: each has a segment of its own.
std::span<const std::byte> SharedPipelineWorld::lent(std::uint32_t rank,
                                                     std::uint64_t number) const {
  const auto& memory = ranks_[rank].lent;
  require(number >= 1 && number <= memory.size(), "a segment that was never lent");
  return memory[number - 1].span();
}

// The memory is the user's again: whoever still reads it reads rubbish.
void SharedPipelineWorld::spoil(std::uint32_t index, std::uint64_t s) {
  for (const auto* memory : {&ranks_[index].outputs[s - 1], &ranks_[index].lent[s - 1]}) {
    if (!memory->empty()) std::memset(memory->data(), 0xff, memory->size());
  }
}

void SharedPipelineWorld::abandon_one(std::uint32_t index) {
  Rank& rank = ranks_[index];
  if (rank.started == rank.ended) return;
  abandon(index, rank.ended + 1 + random_.below(rank.started - rank.ended));
}

void SharedPipelineWorld::abandon(std::uint32_t index, std::uint64_t s) {
  Rank& rank = ranks_[index];
  if (s <= rank.ended) return;
  rank.pipeline->abandon(s);
  std::erase_if(rank.unwritten, [s](const Unwritten& one) { return one.s == s; });
  spoil(index, s);
  rank.given_up.push_back(s);
  operations_[s - 1].abandoned = true;
  const auto has_it = [s](const Rank& other) { return other.ended >= s; };
  if (std::any_of(ranks_.begin(), ranks_.end(), has_it))
    ++coverage["abandoned, yet whole elsewhere"];
  note(index, "abandons", s);
}

bool SharedPipelineWorld::fall_asleep(std::uint32_t index) {
  Rank& rank = ranks_[index];
  const bool waits = rank.pipeline->announce_sleep();
  rank.sleep = waits ? Sleep::announced : Sleep::awake;
  note(index, "sleeps", waits ? 1 : 0);
  return waits;
}

void SharedPipelineWorld::kill(std::uint32_t index) {
  Rank& dead = ranks_[index];
  SleepersWorld::kill(dead);
  ++coverage[dead.ended < dead.started ? "died in an operation" : "died idle"];
  note(index, "dies", dead.ended);
  if (!dead.stopped && random_.chance(1, 2)) close(index);
}

// It has left the group in order, though not all have ended what it began: its users have their
// memory back, with errors.
void SharedPipelineWorld::close(std::uint32_t index) {
  Rank& rank = ranks_[index];
  rank.pipeline->withdraw();
  for (std::uint64_t s = rank.ended + 1; s <= rank.started; ++s) {
    spoil(index, s);
    operations_[s - 1].abandoned = true;
    ++coverage["closed in an operation"];
  }
  note(index, "closes", rank.ended);
}

// The number of inputs of the rank; 0 if it contributes nothing.
std::uint64_t SharedPipelineWorld::inputs_of(std::uint32_t rank, std::uint64_t s) const {
  const Operation& operation = operations_[s - 1];
  return operation.specification.contributes(rank) ? operation.inputs[rank] : 0;
}

float SharedPipelineWorld::value(std::uint32_t rank, std::uint64_t s, std::uint64_t i,
                                 std::uint64_t number) const {
  // Of very different sizes, so that another order of summation gives other bits.
  Random random(seed_ ^ (s << 40) ^ (std::uint64_t{rank} << 32) ^ (number << 24) ^ i);
  const auto mantissa = static_cast<float>(static_cast<std::int64_t>(random.below(2000)) - 1000);
  return mantissa * (random.chance(1, 2) ? 1e-4F : 1e3F);
}

std::vector<float> SharedPipelineWorld::input(std::uint32_t rank, const PipelineOperation& of,
                                              std::uint64_t number) const {
  std::vector<float> values(collective::input_bytes(of.passage, rank) / 4);
  for (std::uint64_t i = 0; i < values.size(); ++i) values[i] = value(rank, of.s, i, number);
  return values;
}

// The sum of the rank's inputs.
float SharedPipelineWorld::share(std::uint32_t rank, std::uint64_t s, std::uint64_t i) const {
  float sum = value(rank, s, i);
  for (std::uint64_t n = 1; n < inputs_of(rank, s); ++n) sum += value(rank, s, i, n);
  return sum;
}

// Of the host's contributors.
float SharedPipelineWorld::sum_here(std::uint64_t s, std::uint64_t i) const {
  float sum = 0;
  bool first = true;
  for (std::uint32_t from = 0; from < layout_.ranks; ++from) {
    if (!operations_[s - 1].specification.contributes(from)) continue;
    const float added = share(from, s, i);
    sum = std::exchange(first, false) ? added : sum + added;
  }
  return sum;
}

std::vector<float> SharedPipelineWorld::expected(std::uint32_t rank, std::uint64_t s) const {
  const PipelineOperation& operation = operations_[s - 1].specification;
  const Passage& passage = operation.passage;
  const std::uint64_t count = passage.count;
  std::vector<float> result;
  const bool mine_only = passage.kind == Kind::reduce_scatter || passage.kind == Kind::scatter;
  const std::uint64_t skip = mine_only ? rank * count : 0;
  if (collective::reduces(passage.kind)) {
    for (std::uint64_t i = 0; i < count; ++i) {
      float sum = sum_here(s, skip + i);
      if (operation.exchanged) sum += theirs(s, i);
      if (operation.divisor != 1) sum /= static_cast<float>(operation.divisor);
      result.push_back(sum);
    }
    return result;
  }
  if (passage.kind == Kind::gather && rank != passage.root) return result;
  const bool all = passage.kind == Kind::gather || passage.kind == Kind::all_gather;
  for (std::uint32_t from = 0; from < layout_.ranks; ++from) {
    if (!all && from != passage.root) continue;
    for (std::uint64_t i = 0; i < count; ++i) result.push_back(value(from, s, skip + i));
  }
  return result;
}

void SharedPipelineWorld::check_result(std::uint32_t index, std::uint64_t s) {
  const std::vector<float> wanted = expected(index, s);
  const MutableBuffer& output = ranks_[index].outputs[s - 1];
  require(output.size() == 4 * wanted.size(), "an output of another size");
  const bool equal =
      wanted.empty() || std::memcmp(output.data(), wanted.data(), output.size()) == 0;
  require(equal, "rank " + std::to_string(index) + " has a wrong result of operation " +
                     std::to_string(s));
  ++coverage["results"];
}

bool SharedPipelineWorld::finished() const {
  const auto rank_finished = [&](const Rank& rank) {
    return rank.dead || rank.ended == operations_.size();
  };
  if (std::all_of(ranks_.begin(), ranks_.end(), rank_finished)) return true;
  return proven();  // the survivors stop where they are
}

bool SharedPipelineWorld::stuck() const {
  if (!exchanged_.empty()) return false;
  for (const Rank& rank : ranks_) {
    if (rank.dead) return false;  // the proof of it wakes the sleepers
    if (!rank.unwritten.empty()) return false;
    const bool over = rank.ended == operations_.size() && rank.to_ring.empty() &&
                      rank.sleep == Sleep::awake && !rank.pipeline->must_look();
    if (over) continue;
    if (rank.sleep != Sleep::asleep || rank.rung) return false;
    if (rank.started < operations_.size()) return false;
  }
  return true;
}

// They find what the others left, may end an operation on it, and must tell nobody.
void SharedPipelineWorld::wake_the_stopped() {
  for (Rank& rank : ranks_) {
    if (!rank.dead) rank.pipeline->give_up();
  }
  for (std::uint32_t i = 0; i < layout_.ranks; ++i) {
    Rank& rank = ranks_[i];
    if (!rank.stopped) continue;
    while (rank.pipeline->step()) ++ticks_;
    const bool survivors =
        std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& other) { return !other.dead; });
    if (survivors) take_ended(i, true);
  }
}

}  // namespace moolink::sim
