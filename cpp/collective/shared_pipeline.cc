#include "collective/shared_pipeline.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/mutant.h"
#include "base/round_up.h"
#include "base/streaming_copy.h"

namespace moolink::collective {
namespace {

constexpr std::uint64_t kMagic = 0x65706970'6b6c6f6d;
constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMaxWindowBytes = std::uint64_t{1} << 30;

struct Header {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint32_t ranks;
  std::uint32_t depth;
  std::uint64_t window_bytes;
};
static_assert(sizeof(Header) <= kLine);

constexpr std::uint64_t kStatusBytes = 32;
// In the offset of lent memory: the output is elsewhere.
constexpr std::uint64_t kInputOnly = std::uint64_t{1} << 63;

std::uint64_t words_at(std::uint32_t rank) { return kLine * (1 + std::uint64_t{rank}); }

// For the operations that some rank may still look at: see status().
std::uint64_t statuses_stride(const PipelineLayout& layout) {
  return round_up(kStatusBytes * (layout.depth + 1), kLine);
}

std::uint64_t windows_at(const PipelineLayout& layout) {
  return round_up(words_at(layout.ranks) + statuses_stride(layout) * layout.ranks, kPage);
}

[[noreturn]] void refuse(const std::string& why) {
  throw Exception(ErrorCode::invalid_argument, "shared pipeline: " + why);
}

}  // namespace

// Written by its rank only.
struct alignas(kLine) SharedPipeline::Words {
  // The last chunk of which: my parts are in my window · my slice is reduced · I have taken all
  // that I need from the others' windows.
  std::array<std::atomic<std::uint64_t>, 3> done;
  // The chunk I wait for, in each word of all ranks; 0: not in this word.
  std::array<std::atomic<std::uint64_t>, 3> wanted;
  std::atomic<std::uint64_t> left;    // 1: I am in a newer epoch
  std::atomic<std::uint64_t> asleep;  // 1: ring my doorbell when all have what I want
};

// A rank's announcement of one operation, before it posts the first chunk of it.
struct SharedPipeline::Status {
  std::atomic<std::uint64_t> given_up;  // s: it has no input and no output here
  std::atomic<std::uint64_t> segment;   // where its memory is lent; 0: it passes through windows
  std::atomic<std::uint64_t> offset;
  std::atomic<std::uint64_t> fingerprint;
};

std::uint64_t SharedPipeline::segment_bytes(const PipelineLayout& layout) {
  static_assert(sizeof(Words) == kLine);
  static_assert(sizeof(Status) == kStatusBytes);
  const bool fits = layout.ranks != 0 && layout.ranks <= kMaxPipelineRanks && layout.depth != 0 &&
                    layout.depth <= kMaxPipelineDepth && layout.window_bytes % kLine == 0 &&
                    layout.window_bytes <= kMaxWindowBytes &&
                    layout.window_bytes >= kLine * layout.ranks;  // a line for each rank's block
  if (!fits) {
    refuse("no segment for " + std::to_string(layout.ranks) + " ranks with " +
           std::to_string(layout.depth) + " windows of " + std::to_string(layout.window_bytes) +
           " bytes");
  }
  return windows_at(layout) + layout.window_bytes * layout.depth * layout.ranks;
}

void SharedPipeline::initialise(std::span<std::byte> segment, const PipelineLayout& layout) {
  if (segment.size() < segment_bytes(layout)) refuse("the segment is too small");
  const Header header{kMagic, layout.epoch, layout.ranks, layout.depth, layout.window_bytes};
  std::memcpy(segment.data(), &header, sizeof header);
}

SharedPipeline::SharedPipeline(std::shared_ptr<void> owner, std::span<std::byte> segment,
                               const PipelineLayout& layout, std::uint32_t rank, LentMemory lent)
    : owner_(std::move(owner)),
      segment_(segment.data()),
      layout_(layout),
      rank_(rank),
      lent_(std::move(lent)) {
  if (rank >= layout.ranks) refuse("rank " + std::to_string(rank) + " is not in the layout");
  Header header{};
  if (segment.size() >= segment_bytes(layout)) {
    std::memcpy(&header, segment.data(), sizeof header);
  }
  const PipelineLayout theirs{header.epoch, header.ranks, header.depth, header.window_bytes};
  if (header.magic != kMagic || theirs != layout) {
    throw Exception(ErrorCode::wire, "the segment that was passed for the collectives of epoch " +
                                         std::to_string(layout.epoch) +
                                         " has another layout (epoch " +
                                         std::to_string(theirs.epoch) + ", " +
                                         std::to_string(theirs.ranks) + " ranks)");
  }
}

SharedPipeline::Words& SharedPipeline::words(std::uint32_t rank) const {
  return *reinterpret_cast<Words*>(segment_ + words_at(rank));
}

// There are depth + 1 of them: a rank begins operation s + depth + 1, at least as many chunks
// later, after all ranks have taken all chunks of s, and each looks at these words before that.
SharedPipeline::Status& SharedPipeline::status(std::uint32_t rank, std::uint64_t s) const {
  const std::uint64_t slot = s % (layout_.depth + 1);
  return *reinterpret_cast<Status*>(segment_ + words_at(layout_.ranks) +
                                    statuses_stride(layout_) * rank + kStatusBytes * slot);
}

std::byte* SharedPipeline::window(std::uint32_t rank, std::uint64_t chunk) const {
  const std::uint64_t index = std::uint64_t{rank} * layout_.depth + chunk % layout_.depth;
  return segment_ + windows_at(layout_) + layout_.window_bytes * index;
}

// Where the rank of a move has its data: in its window, or in its lent memory.
const std::byte* SharedPipeline::part_of(Stage stage, const Running& running, std::uint64_t chunk,
                                         const Move& move) const {
  const PipelineOperation& operation = running.operation;
  const Status& said = status(move.rank, operation.s);
  const std::uint64_t segment = said.segment.load(std::memory_order_relaxed);
  const std::uint64_t place = said.offset.load(std::memory_order_relaxed);
  const bool is_there = stage == kReduce || (place & kInputOnly) == 0 || mutant("take_the_input");
  if (segment != 0 && is_there && lent_ && operation.passage.kind == Kind::all_reduce) {
    const std::span<const std::byte> memory = lent_(move.rank, segment);
    const std::uint64_t offset = place & ~kInputOnly;
    const std::uint64_t size = input_bytes(operation.passage, move.rank);
    if (offset <= memory.size() && size <= memory.size() - offset) {
      return memory.data() + offset + move.user;
    }
  }
  return window(move.rank, chunk) + move.window;
}

// --- the user's side

void SharedPipeline::start(PipelineOperation operation) {
  if (operation.s != started_ + 1) {
    refuse("operation " + std::to_string(operation.s) + " started after " +
           std::to_string(started_));
  }
  check(operation, layout_.ranks, rank_);
  started_ = operation.s;
  Running running;
  running.first = last_chunk_ + 1;
  running.chunks = chunks_of(operation.passage, layout_.window_bytes);
  last_chunk_ += running.chunks;
  running.operation = std::move(operation);
  running_.push_back(std::move(running));
}

void SharedPipeline::abandon(std::uint64_t s) {
  for (Running& running : running_) {
    PipelineOperation& operation = running.operation;
    if (operation.s != s || std::exchange(operation.abandoned, true)) continue;
    operation.inputs.clear();
    operation.output = {};
    // Before that its word may still belong to an earlier operation: post() will store it.
    if (cursors_[kPut].next > running.first && !mutant("abandon_in_silence")) {
      status(rank_, s).given_up.store(s, std::memory_order_seq_cst);
    }
  }
}

void SharedPipeline::withdraw() {
  if (mutant("close_in_silence")) return;
  for (const Running& running : running_) {
    if (running.is_lent()) abandon(running.operation.s);
  }
}

std::vector<SharedPipeline::Ended> SharedPipeline::take_ended() {
  return std::exchange(ended_, {});
}

void SharedPipeline::give_up() { words(rank_).left.store(1, std::memory_order_seq_cst); }

bool SharedPipeline::given_up() const {
  if (mutant("tell_of_what_was_given_up")) return false;
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (words(rank).left.load(std::memory_order_seq_cst) != 0) return true;
  }
  return false;
}

std::vector<std::uint32_t> SharedPipeline::waiting_for() const {
  if (running_.empty()) return {};
  const std::uint64_t chunk = cursors_[kTake].next;
  const auto behind = [&](Stage word, std::uint64_t wanted) {
    std::vector<std::uint32_t> late;
    for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
      if (rank != rank_ && words(rank).done[word].load() < wanted) late.push_back(rank);
    }
    return late;
  };
  if (running_.front().taken) return behind(kTake, running_.front().last());
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
  for (const Stage stage : {kTake, kReduce, kPut}) {
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

std::uint64_t SharedPipeline::least(Stage word) const {
  std::uint64_t least = ~std::uint64_t{0};
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    least = std::min(least, words(rank).done[word].load(std::memory_order_seq_cst));
  }
  return least;
}

SharedPipeline::Needs SharedPipeline::needs(Stage stage) {
  const std::uint64_t chunk = cursors_[stage].next;
  const PipelineOperation& operation = running_at(chunk)->operation;
  // The window's chunk before has been taken.
  const Need window{kTake, chunk > layout_.depth ? chunk - layout_.depth : 0};
  Needs needs{};
  switch (stage) {
    case kPut:
      if (!mutant("put_into_unread_windows")) needs[0] = window;
      break;
    case kReduce:
      // Without a reduction, the window is ready as soon as it is filled.
      if (reduces(operation.passage.kind) && !mutant("reduce_without_parts")) {
        needs[0] = {kPut, chunk};
      }
      // Nothing was put into the window, but the result will be.
      if (operation.lent.segment != 0 && !operation.in_place() &&
          !mutant("reduce_into_unread_windows")) {
        needs[1] = window;
      }
      break;
    case kTake:
      if (!operation.passage.whole && !mutant("take_too_early")) needs[0] = {kReduce, chunk};
      break;
  }
  return needs;
}

bool SharedPipeline::is_met(const Need& need) const {
  return need.chunk == 0 || least(need.word) >= need.chunk;
}

bool SharedPipeline::is_ready(Stage stage) {
  const std::uint64_t chunk = cursors_[stage].next;
  if (chunk > last_chunk_) return false;
  if (stage != kPut && cursors_[stage - 1].next <= chunk) return false;
  return std::ranges::all_of(needs(stage), [this](const Need& need) { return is_met(need); });
}

void SharedPipeline::advance(Stage stage) {
  Cursor& cursor = cursors_[stage];
  Running& running = *running_at(cursor.next);
  if (cursor.planned != cursor.next) {
    if (stage == kTake && cursor.next == running.first) check_agreement(running);
    cursor.plan = chunk_plan(running.operation.passage, layout_.window_bytes, rank_,
                             cursor.next - running.first);
    cursor.planned = cursor.next;
    if (mutant("publish_before_copying")) words(rank_).done[stage].store(cursor.next);
  }
  const bool worked =
      !running.operation.abandoned && (stage == kPut      ? put_part(running, cursor)
                                       : stage == kReduce ? reduce_part(running, cursor)
                                                          : take_part(running, cursor));
  if (worked) {
    ++cursor.part;
  } else {
    post(stage, running);
  }
}

// When a chunk is taken, the statuses of all ranks are there.
void SharedPipeline::check_agreement(const Running& running) const {
  const std::uint64_t s = running.operation.s;
  const std::uint64_t mine = running.operation.fingerprint();
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (status(rank, s).fingerprint.load(std::memory_order_relaxed) == mine) continue;
    throw Exception(ErrorCode::error, "shared operation " + std::to_string(s) + " of epoch " +
                                          std::to_string(layout_.epoch) + ": rank " +
                                          std::to_string(rank) + " started another one than rank " +
                                          std::to_string(rank_) +
                                          ": the members' tensors differ in size or type");
  }
}

bool SharedPipeline::put_part(const Running& running, const Cursor& cursor) {
  const std::vector<Move>& puts = cursor.plan.puts;
  if (running.is_lent() || running.operation.inputs.empty() || cursor.part == puts.size()) {
    return false;
  }
  const Move& move = puts[cursor.part];
  combine_own(running.operation, move, window(rank_, cursor.next) + move.window);
  return true;
}

// This rank's share of what is reduced.
void SharedPipeline::combine_own(const PipelineOperation& operation, const Move& move,
                                 std::byte* to) {
  if (operation.inputs.size() == 1 || mutant("forget_an_input")) {
    std::memcpy(to, operation.inputs.front().data() + move.user, move.bytes);
    return;
  }
  SumTask task{operation.dtype, operation.op, 1, {}, MutableBuffer({}, to, move.bytes)};
  for (const Buffer& input : operation.inputs) {
    task.inputs.push_back(input.slice(move.user, move.bytes));
  }
  run(task);
}

bool SharedPipeline::reduce_part(const Running& running, const Cursor& cursor) {
  const Move& slice = cursor.plan.reduced;
  if (cursor.part != 0 || slice.bytes == 0) return false;
  const PipelineOperation& operation = running.operation;
  std::byte* own = window(rank_, cursor.next) + slice.window;
  const std::byte* share = own;
  if (operation.inputs.size() == 1) {
    share = operation.inputs.front().data() + slice.user;
  } else if (!operation.inputs.empty() && !operation.passage.whole) {  // else it is there
    combine_own(operation, slice, own);
  }
  SumTask task{operation.dtype, operation.op, operation.divisor, {}, {}};
  task.inputs.reserve(layout_.ranks);
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (!operation.contributes(rank) && !mutant("add_everybody")) continue;
    const Move place{rank, slice.window, slice.user, slice.bytes};
    const std::byte* part = rank == rank_ ? share : part_of(kReduce, running, cursor.next, place);
    task.inputs.emplace_back(std::shared_ptr<const void>(), part, slice.bytes);
  }
  if (mutant("reduce_in_another_order") && rank_ % 2 == 1) {
    std::reverse(task.inputs.begin(), task.inputs.end());
  }
  const MutableBuffer output = operation.output.slice(cursor.plan.placed, slice.bytes);
  if (!cursor.plan.passed_on || (running.is_lent() && operation.in_place())) {
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

// Makes finished work visible to the others. Lent memory is all visible at once.
void SharedPipeline::post(Stage stage, Running& running) {
  Cursor& cursor = cursors_[stage];
  if (stage == kPut) {
    publish_status(running);
    if (running.is_lent()) cursor.next = running.last();
  }
  if (stage == kTake && cursor.next == running.last()) {
    running.taken = true;
    running.meaningless = was_given_up(running.operation.s);
  }
  words(rank_).done[stage].store(cursor.next, std::memory_order_seq_cst);
  if (!mutant("never_ring")) must_look_ = true;
  ++cursor.next;
  cursor.part = 0;
  if (may_end()) end();
}

void SharedPipeline::publish_status(const Running& running) {
  const PipelineOperation& operation = running.operation;
  Status& mine = status(rank_, operation.s);
  if (cursors_[kPut].next == running.first) {
    mine.fingerprint.store(operation.fingerprint(), std::memory_order_relaxed);
  }
  if (cursors_[kPut].next == running.first && !mutant("lend_in_silence")) {
    const std::uint64_t place = operation.in_place() ? 0 : kInputOnly;
    mine.offset.store(operation.lent.offset | place, std::memory_order_relaxed);
    mine.segment.store(operation.abandoned ? 0 : operation.lent.segment, std::memory_order_relaxed);
  }
  if (operation.abandoned && !mutant("abandon_in_silence")) {
    mine.given_up.store(operation.s, std::memory_order_seq_cst);
  }
}

// Lent memory is the user's again when no rank reads it any more: an input, when all have reduced,
// for which the last take has waited.
bool SharedPipeline::may_end() const {
  if (running_.empty() || !running_.front().taken) return false;
  const Running& first = running_.front();
  const bool is_read =
      first.is_lent() && (first.operation.in_place() || first.operation.passage.whole);
  return !is_read || mutant("end_while_others_read") || least(kTake) >= first.last();
}

void SharedPipeline::end() {
  const Running& first = running_.front();
  ended_.push_back({first.operation.s, first.operation.abandoned || first.meaningless});
  running_.pop_front();
}

bool SharedPipeline::was_given_up(std::uint64_t s) const {
  if (mutant("end_what_was_abandoned")) return false;
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (status(rank, s).given_up.load(std::memory_order_seq_cst) == s) return true;
  }
  return false;
}

// --- sleeping

// After every store this rank looks for sleepers, and after every announcement of sleep it looks at
// the stores; all are seq_cst, so that of the sleeper and the last rank it waits for, at least one
// sees the other.
void SharedPipeline::look_for_sleepers() {
  must_look_ = false;
  const std::array<std::uint64_t, 3> all{least(kPut), least(kReduce), least(kTake)};
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    const Words& line = words(rank);
    if (rank == rank_ || line.asleep.load(std::memory_order_seq_cst) == 0) continue;
    for (std::size_t word = 0; word < all.size(); ++word) {
      const std::uint64_t wanted = line.wanted[word].load(std::memory_order_relaxed);
      const std::uint64_t have = mutant("ring_too_late") ? all[word] - 1 : all[word];
      if (wanted == 0 || have < wanted) continue;
      wakeups_.push_back(rank);
      break;
    }
  }
}

std::vector<std::uint32_t> SharedPipeline::take_wakeups() { return std::exchange(wakeups_, {}); }

bool SharedPipeline::announce_sleep() {
  if (running_.empty()) return false;
  std::array<std::uint64_t, 3> wanted{};
  const auto want = [&wanted](const Need& need) {  // the earliest event wakes
    std::uint64_t& chunk = wanted[need.word];
    chunk = chunk == 0 ? need.chunk : std::min(chunk, need.chunk);
  };
  for (const Stage stage : {kPut, kReduce, kTake}) {
    const std::uint64_t chunk = cursors_[stage].next;
    // A stage that waits for the one before it wakes with that one.
    if (chunk > last_chunk_ || (stage != kPut && cursors_[stage - 1].next <= chunk)) continue;
    for (const Need& need : needs(stage)) {
      if (!is_met(need)) want(need);
    }
  }
  if (running_.front().taken) want({kTake, running_.front().last()});
  Words& mine = words(rank_);
  for (std::size_t word = 0; word < wanted.size(); ++word) {
    mine.wanted[word].store(wanted[word], std::memory_order_relaxed);
  }
  mine.asleep.store(1, std::memory_order_seq_cst);
  return true;
}

bool SharedPipeline::may_sleep() {
  if (mutant("sleep_without_a_look")) return true;
  return !must_look_ && !may_end() && !is_ready(kTake) && !is_ready(kReduce) && !is_ready(kPut);
}

void SharedPipeline::awake() { words(rank_).asleep.store(0, std::memory_order_relaxed); }

}  // namespace moolink::collective
