#include "collective/shared_pipeline.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/streaming_copy.h"

namespace moolink::collective {
namespace {

// Set in the offset of lent memory if the output is elsewhere.
constexpr std::uint64_t kInputOnly = std::uint64_t{1} << 63;

}  // namespace

SharedPipeline::SharedPipeline(PipelineSegment segment, std::uint32_t rank, Allocator& memory,
                               LentMemory lent)
    : segment_(std::move(segment)), rank_(rank), memory_(memory), lent_(std::move(lent)) {}

// Where the rank of a move has its data: in its window, or in its lent memory.
const std::byte* SharedPipeline::part_of(Stage stage, const Running& running, std::uint64_t chunk,
                                         const Move& move) const {
  if (const auto lent = running.lent.find(move.rank); lent != running.lent.end()) {
    const auto& [memory, offset, input_only] = lent->second;
    if (stage == kReduce || !input_only) {
      return memory->data() + offset + move.user;
    }
  }
  return segment_.window(move.rank, chunk) + move.window;
}

// The places that the statuses of the others name, kept mapped until the operation has ended. All
// have put the first chunk.
void SharedPipeline::find_lent(Running& running) const {
  const Passage& passage = running.operation.passage;
  if (!lent_ || passage.kind != Kind::all_reduce) return;
  for (std::uint32_t rank = 0; rank < layout().ranks; ++rank) {
    const PipelineSegment::Status& said = segment_.status(rank, running.operation.s);
    const std::uint64_t segment = said.segment.load(std::memory_order_relaxed);
    if (rank == rank_ || segment == 0) continue;
    LentBytes memory = lent_(rank, segment);
    const std::uint64_t place = said.offset.load(std::memory_order_relaxed);
    const std::uint64_t offset = place & ~kInputOnly;
    const std::uint64_t size = input_bytes(passage, rank);
    if (memory == nullptr && !segment_.is_abandoned(running.operation.s) && !segment_.is_left()) {
      throw Exception(ErrorCode::error, "rank " + std::to_string(rank) +
                                            " lends memory that it has not passed to rank " +
                                            std::to_string(rank_));
    }
    if (memory == nullptr || offset > memory->size() || size > memory->size() - offset) continue;
    running.lent.emplace(rank, Lent{std::move(memory), offset, (place & kInputOnly) != 0});
  }
}

// --- the user's side

void SharedPipeline::start(PipelineOperation operation) {
  if (operation.s != started_ + 1) {
    throw Exception(ErrorCode::invalid_argument, "shared pipeline: operation " +
                                                     std::to_string(operation.s) +
                                                     " started after " + std::to_string(started_));
  }
  started_ = operation.s;
  Running running;
  running.first = last_chunk_ + 1;
  running.chunks = chunks_of(operation.passage, layout().window_bytes);
  last_chunk_ += running.chunks;
  running.operation = std::move(operation);
  running_.push_back(std::move(running));
  skip_sums();
}

void SharedPipeline::abandon(std::uint64_t s) {
  for (Running& running : running_) {
    PipelineOperation& operation = running.operation;
    if (operation.s != s || std::exchange(operation.abandoned, true)) continue;
    operation.inputs.clear();
    operation.output = {};
    running.results.clear();
    // Before that its word may still belong to an earlier operation: post() will store it.
    if (cursors_[kPut].next > running.first) {
      segment_.status(rank_, s).given_up.store(s, std::memory_order_seq_cst);
    }
  }
}

void SharedPipeline::withdraw() {
  for (const Running& running : running_) {
    if (running.is_lent()) abandon(running.operation.s);
  }
}

void SharedPipeline::publish(std::uint64_t s, std::uint32_t chunk, Buffer result) {
  for (Running& running : running_) {
    if (running.operation.s != s || running.operation.abandoned) continue;
    running.results.emplace(chunk, std::move(result));
    return;
  }
}

bool SharedPipeline::given_up() const { return segment_.is_left(); }

std::vector<std::uint32_t> SharedPipeline::waiting_for() const {
  if (running_.empty()) return {};
  const std::uint64_t chunk = cursors_[kTake].next;
  const auto behind = [&](Stage word, std::uint64_t wanted) {
    std::vector<std::uint32_t> late;
    for (std::uint32_t rank = 0; rank < layout().ranks; ++rank) {
      if (rank != rank_ && segment_.words(rank).done[word].load() < wanted) late.push_back(rank);
    }
    return late;
  };
  if (running_.front().taken) return behind(kTake, running_.front().last());
  // Without a free window, no rank can put. The cause is a rank that has not taken.
  const std::uint64_t depth = layout().depth;
  if (cursors_[kPut].next <= chunk && chunk > depth) {
    if (auto late = behind(kTake, chunk - depth); !late.empty()) return late;
  }
  std::vector<std::uint32_t> late = behind(kPut, chunk);
  return late.empty() ? behind(kReduce, chunk) : late;
}

// --- steps

bool SharedPipeline::step() {
  if (must_look_) {
    look_for_sleepers();
    return true;
  }
  if (may_end()) {
    end();
    return true;
  }
  // First the stage that frees windows: chunks are taken while they are in the cache.
  for (const Stage stage : {kTake, kReduce, kSum, kPut}) {
    if (!is_ready(stage)) continue;
    advance(stage);
    return true;
  }
  return false;
}

SharedPipeline::Running* SharedPipeline::running_at(std::uint64_t chunk) {
  for (Running& running : running_) {
    if (chunk <= running.last()) return &running;
  }
  return nullptr;
}

// Whether the stages before it have done the chunk here.
bool SharedPipeline::follows(Stage stage, std::uint64_t chunk) const {
  switch (stage) {
    case kPut:
      return true;
    case kSum:
      return cursors_[kPut].next > chunk;
    case kReduce:
      return cursors_[kPut].next > chunk && cursors_[kSum].next > chunk;
    case kTake:
      return cursors_[kReduce].next > chunk;
  }
  return false;
}

// Whether this rank's inputs of the chunk are written. An abandoned operation does not read them.
bool SharedPipeline::is_written(const Running& running, std::uint64_t chunk) const {
  const PipelineOperation& operation = running.operation;
  if (operation.abandoned) return true;
  return operation.written.reaches(
      chunk_end(operation.passage, layout().window_bytes, chunk - running.first));
}

// Moves the cursor past operations that are not exchanged.
void SharedPipeline::skip_sums() {
  std::uint64_t& next = cursors_[kSum].next;
  while (next <= last_chunk_) {
    const Running& running = *running_at(next);
    if (running.operation.exchanged) return;
    next = running.last() + 1;
  }
}

SharedPipeline::Needs SharedPipeline::needs(Stage stage) {
  const std::uint64_t chunk = cursors_[stage].next;
  const PipelineOperation& operation = running_at(chunk)->operation;
  // All ranks have taken the window's previous chunk.
  const Need window{kTake, chunk > layout().depth ? chunk - layout().depth : 0};
  Needs needs{};
  switch (stage) {
    case kPut:
      needs[0] = window;
      break;
    case kReduce:
      // Without a reduction, the window is ready as soon as it is filled.
      if (reduces(operation.passage.kind) && !operation.exchanged) {
        needs[0] = {kPut, chunk};
      }
      // Put has left the window as it was, but reduce writes the result there.
      if (operation.lent.segment != 0 && !operation.in_place()) {
        needs[1] = window;
      }
      break;
    case kTake:
      needs[0] = {kReduce, chunk};
      break;
    case kSum:
      needs[0] = {kPut, chunk};
      needs[1] = window;  // so that as many sums as windows are under way, also of lent memory
      break;
  }
  return needs;
}

bool SharedPipeline::is_ready(Stage stage) {
  const std::uint64_t chunk = cursors_[stage].next;
  if (chunk > last_chunk_ || !follows(stage, chunk)) return false;
  const Running& running = *running_at(chunk);
  if (stage == kPut && !is_written(running, chunk)) return false;
  if (stage == kReduce) {
    const bool waits = running.operation.exchanged && !running.operation.abandoned;
    if (waits && !running.results.contains(running.number(chunk))) return false;
  }
  return std::ranges::all_of(needs(stage), [this](const Need& need) { return is_met(need); });
}

void SharedPipeline::advance(Stage stage) {
  Cursor& cursor = cursors_[stage];
  Running& running = *running_at(cursor.next);
  if (cursor.planned != cursor.next) {
    const bool first = cursor.next == running.first;
    const bool relies_on_others = stage == kTake || stage == kSum;
    if (first && relies_on_others) check_agreement(running);
    if (first && stage == (running.operation.exchanged ? kSum : kReduce)) find_lent(running);
    cursor.plan = chunk_plan(running.operation.passage, layout().window_bytes, rank_,
                             cursor.next - running.first);
    cursor.planned = cursor.next;
  }
  const bool worked = !running.operation.abandoned && do_part(stage, running, cursor);
  if (worked) {
    ++cursor.part;
  } else {
    post(stage, running);
  }
}

bool SharedPipeline::do_part(Stage stage, Running& running, const Cursor& cursor) {
  switch (stage) {
    case kPut:
      return put_part(running, cursor);
    case kReduce:
      return running.operation.exchanged ? place_part(running, cursor)
                                         : reduce_part(running, cursor);
    case kTake:
      return take_part(running, cursor);
    case kSum:
      return sum_part(running, cursor);
  }
  return false;
}

// Before a rank sums or takes a chunk, all ranks have written their statuses.
void SharedPipeline::check_agreement(const Running& running) const {
  const std::uint64_t s = running.operation.s;
  const std::uint64_t mine = running.operation.fingerprint();
  for (std::uint32_t rank = 0; rank < layout().ranks; ++rank) {
    if (segment_.status(rank, s).fingerprint.load(std::memory_order_relaxed) == mine) continue;
    throw Exception(ErrorCode::error,
                    "shared operation " + std::to_string(s) + " of membership " +
                        std::to_string(layout().epoch) + ": rank " + std::to_string(rank) +
                        " started a different one from rank " + std::to_string(rank_) +
                        ": the members' tensors differ in size or type");
  }
}

bool SharedPipeline::put_part(const Running& running, const Cursor& cursor) {
  const std::vector<Move>& puts = cursor.plan.puts;
  if (running.is_lent() || running.operation.inputs.empty() || cursor.part == puts.size()) {
    return false;
  }
  const Move& move = puts[cursor.part];
  combine_own(running.operation, move, segment_.window(rank_, cursor.next) + move.window);
  return true;
}

// Writes this rank's contribution to a reduction: its inputs combined.
void SharedPipeline::combine_own(const PipelineOperation& operation, const Move& move,
                                 std::byte* to) {
  if (operation.inputs.size() == 1) {
    std::memcpy(to, operation.inputs.front().data() + move.user, move.bytes);
    return;
  }
  SumTask task{operation.dtype, operation.op, 1, {}, MutableBuffer({}, to, move.bytes)};
  for (const Buffer& input : operation.inputs) {
    task.inputs.push_back(input.slice(move.user, move.bytes));
  }
  run(task);
}

// Of the contributors' parts of this rank's slice. `combined` has room for its own if it has
// several inputs.
SumTask SharedPipeline::sum_of_inputs(const Running& running, const Cursor& cursor,
                                      std::byte* combined) const {
  const Move& slice = cursor.plan.reduced;
  const PipelineOperation& operation = running.operation;
  const std::byte* share = combined;
  if (operation.inputs.size() == 1) {
    share = operation.inputs.front().data() + slice.user;
  } else if (!operation.inputs.empty()) {
    combine_own(operation, slice, combined);
  }
  SumTask task{operation.dtype, operation.op, operation.divisor, {}, {}};
  task.inputs.reserve(layout().ranks);
  for (std::uint32_t rank = 0; rank < layout().ranks; ++rank) {
    if (!operation.contributes(rank)) continue;
    const Move place{rank, slice.window, slice.user, slice.bytes};
    const std::byte* part = rank == rank_ ? share : part_of(kReduce, running, cursor.next, place);
    task.inputs.emplace_back(std::shared_ptr<const void>(), part, slice.bytes);
  }
  return task;
}

bool SharedPipeline::reduce_part(const Running& running, const Cursor& cursor) {
  const Move& slice = cursor.plan.reduced;
  if (cursor.part != 0 || slice.bytes == 0) return false;
  const PipelineOperation& operation = running.operation;
  std::byte* own = segment_.window(rank_, cursor.next) + slice.window;
  SumTask task = sum_of_inputs(running, cursor, own);
  const MutableBuffer output = operation.output.slice(cursor.plan.placed, slice.bytes);
  if (!cursor.plan.passed_on || running.is_read_in_place()) {
    task.output = output;
    run(task);
    return true;
  }
  // Into the window first, which stays in the cache.
  task.output = MutableBuffer({}, own, slice.bytes);
  run(task);
  to_user(operation, output.data(), own, slice.bytes);
  return true;
}

// The sum of an exchanged operation goes into new memory, not into the window: it leaves this host.
bool SharedPipeline::sum_part(Running& running, const Cursor& cursor) {
  if (cursor.part != 0) return false;
  const Move& slice = cursor.plan.reduced;
  const PipelineOperation& operation = running.operation;
  const std::uint32_t chunk = running.number(cursor.next);
  if (slice.bytes == 0) {
    running.results.emplace(chunk, Buffer());
    return true;
  }
  MutableBuffer combined;
  if (operation.inputs.size() > 1) combined = memory_.allocate(slice.bytes);
  SumTask task = sum_of_inputs(running, cursor, combined.data());
  const std::uint64_t count = slice.bytes / operation.passage.item_size;
  task.output = memory_.allocate(count * tensor::item_size(partial_dtype(operation.dtype)));
  task.partial_output = true;
  if (task.inputs.empty()) {
    std::memset(task.output.data(), 0, task.output.size());
  } else {
    run(task);
  }
  // A rank that abandons it says so before its part is meaningless.
  if (segment_.is_abandoned(operation.s)) {
    running.results.emplace(chunk, Buffer());
  } else {
    sums_.push_back({operation.s, chunk, task.output});
  }
  return true;
}

// Puts the result of this rank's slice in place.
bool SharedPipeline::place_part(const Running& running, const Cursor& cursor) {
  if (cursor.part != 0) return false;
  const Buffer& result = running.results.at(running.number(cursor.next));
  const Move& slice = cursor.plan.reduced;
  if (result.size() != slice.bytes || result.empty()) return true;  // no elements, or abandoned
  const PipelineOperation& operation = running.operation;
  std::byte* output = operation.output.data() + cursor.plan.placed;
  if (!cursor.plan.passed_on || running.is_read_in_place()) {
    to_user(operation, output, result.data(), slice.bytes);
    return true;
  }
  std::byte* own = segment_.window(rank_, cursor.next) + slice.window;
  std::memcpy(own, result.data(), slice.bytes);
  to_user(operation, output, own, slice.bytes);
  return true;
}

void SharedPipeline::to_user(const PipelineOperation& operation, std::byte* to,
                             const std::byte* from, std::uint64_t bytes) const {
  const std::uint64_t whole = input_bytes(operation.passage, rank_) + operation.output.size();
  streaming_copy({to, bytes}, {from, bytes}, whole);
}

bool SharedPipeline::take_part(const Running& running, const Cursor& cursor) {
  const ChunkPlan& plan = cursor.plan;
  const PipelineOperation& operation = running.operation;
  if (cursor.part < plan.takes.size()) {
    const Move& move = plan.takes[cursor.part];
    to_user(operation, operation.output.data() + move.user,
            part_of(kTake, running, cursor.next, move), move.bytes);
    return true;
  }
  if (cursor.part == plan.takes.size() + plan.own.size()) return false;
  const Move& move = plan.own[cursor.part - plan.takes.size()];
  const std::byte* from = operation.inputs.front().data() + move.window;
  std::byte* to = operation.output.data() + move.user;
  if (from != to) to_user(operation, to, from, move.bytes);
  return true;
}

// Makes finished work visible to the others. Lent memory is visible as far as it is written.
void SharedPipeline::post(Stage stage, Running& running) {
  Cursor& cursor = cursors_[stage];
  if (stage == kPut) {
    publish_status(running);
    if (running.is_lent()) {
      while (cursor.next < running.last() && is_written(running, cursor.next + 1)) ++cursor.next;
    }
  }
  if (stage == kReduce) running.results.erase(running.number(cursor.next));
  if (stage == kTake && cursor.next == running.last()) {
    running.taken = true;
    running.meaningless = segment_.is_abandoned(running.operation.s);
  }
  if (stage != kSum) {
    segment_.words(rank_).done[stage].store(cursor.next, std::memory_order_seq_cst);
    must_look_ = true;
  }
  ++cursor.next;
  cursor.part = 0;
  if (stage == kSum) skip_sums();
  if (may_end()) end();
}

void SharedPipeline::publish_status(const Running& running) {
  const PipelineOperation& operation = running.operation;
  PipelineSegment::Status& mine = segment_.status(rank_, operation.s);
  if (cursors_[kPut].next == running.first) {
    mine.fingerprint.store(operation.fingerprint(), std::memory_order_relaxed);
    const std::uint64_t place = operation.in_place() ? 0 : kInputOnly;
    mine.offset.store(operation.lent.offset | place, std::memory_order_relaxed);
    mine.segment.store(operation.abandoned ? 0 : operation.lent.segment, std::memory_order_relaxed);
  }
  if (operation.abandoned) {
    mine.given_up.store(operation.s, std::memory_order_seq_cst);
  }
}

// Lent memory is the user's again when no rank reads it any more. If it is only the input, the
// others read it until they have reduced, and the last take has waited for that.
bool SharedPipeline::may_end() const {
  if (running_.empty() || !running_.front().taken) return false;
  const Running& first = running_.front();
  return !first.is_read_in_place() || segment_.least(kTake) >= first.last();
}

void SharedPipeline::end() {
  const Running& first = running_.front();
  ended_.push_back({first.operation.s, first.operation.abandoned || first.meaningless});
  running_.pop_front();
}

}  // namespace moolink::collective
