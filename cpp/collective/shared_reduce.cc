#include "collective/shared_reduce.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/mutant.h"
#include "base/round_up.h"

namespace moolink::collective {
namespace {

constexpr std::uint64_t kMagic = 0x6465726f6d6c6b31;
constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kPage = 4096;

struct Header {
  std::uint64_t magic;
  std::uint64_t epoch;
  std::uint32_t ranks;
  std::uint32_t depth;
  std::uint32_t buckets;
  std::uint32_t unused;
  std::uint64_t bytes_per_slot;
};
static_assert(sizeof(Header) <= kLine);

std::uint64_t slot_stride(const SharedLayout& layout) {
  return round_up(layout.bytes_per_slot, kPage);
}

[[noreturn]] void refuse(const std::string& why) {
  throw Exception(ErrorCode::invalid_argument, "shared allreduce: " + why);
}

bool is_rising(const std::vector<std::uint32_t>& numbers, std::uint32_t limit) {
  return std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()) ==
             numbers.end() &&
         (numbers.empty() || numbers.back() < limit);
}

bool contains(const std::vector<std::uint32_t>& rising, std::uint32_t value) {
  return std::binary_search(rising.begin(), rising.end(), value);
}

// What ranks must agree on, in one word (FNV-1a over words).
std::uint64_t fingerprint(const SharedOperation& operation) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&hash](std::uint64_t word) { hash = (hash ^ word) * 0x100000001b3ULL; };
  add(static_cast<std::uint64_t>(operation.op));
  add(std::bit_cast<std::uint64_t>(operation.divisor));
  add(operation.whole ? 1 : 0);
  for (const SharedSection& section : operation.sections) {
    add(static_cast<std::uint64_t>(section.dtype));
    add(section.offset);
    add(section.count);
  }
  return hash;
}

constexpr std::uint64_t kPieceBytes = std::uint64_t{256} << 10;

}  // namespace

// Only its rank writes it. Each word: I have done this for all operations up to that one.
struct alignas(kLine) SharedReduce::Words {
  std::atomic<std::uint64_t> in;      // announced, my inputs are in place
  std::atomic<std::uint64_t> red;     // my slice of the result is in place
  std::atomic<std::uint64_t> out;     // I do not need the result any more
  std::atomic<std::uint64_t> left;    // 1: I am in a newer epoch
  std::atomic<std::uint64_t> asleep;  // 1: ring my doorbell when you store something
};

// A rank's announcement of an operation, before it raises `in`.
struct SharedReduce::Announcement {
  std::atomic<std::uint64_t> fingerprint;
  std::atomic<std::uint64_t> buckets;  // bit map of its inputs
};

namespace {

std::uint64_t announcements_at(const SharedLayout& layout) {
  return kLine * (1 + std::uint64_t{layout.ranks});
}

constexpr std::uint64_t kAnnouncementBytes = 16;

// Of one rank, so that no two ranks write into one cache line.
std::uint64_t announcements_stride(const SharedLayout& layout) {
  return round_up(kAnnouncementBytes * layout.depth, kLine);
}

std::uint64_t inputs_at(const SharedLayout& layout) {
  return round_up(announcements_at(layout) + announcements_stride(layout) * layout.ranks, kPage);
}

std::uint64_t results_at(const SharedLayout& layout) {
  return inputs_at(layout) + slot_stride(layout) * layout.ranks * std::uint64_t{layout.buckets};
}

}  // namespace

std::uint64_t SharedReduce::segment_bytes(const SharedLayout& layout) {
  static_assert(sizeof(Announcement) == kAnnouncementBytes && sizeof(Words) == kLine);
  constexpr std::uint64_t kMaxSlotBytes = std::uint64_t{1} << 40;
  if (layout.ranks == 0 || layout.ranks > kMaxSharedRanks || layout.depth == 0 ||
      layout.depth > kMaxSharedDepth || layout.buckets == 0 || layout.buckets > kMaxSharedBuckets ||
      layout.bytes_per_slot > kMaxSlotBytes) {
    refuse("no segment for " + std::to_string(layout.ranks) + " ranks, " +
           std::to_string(layout.depth) + " results and " + std::to_string(layout.buckets) +
           " inputs of " + std::to_string(layout.bytes_per_slot) + " bytes");
  }
  return results_at(layout) + slot_stride(layout) * layout.depth;
}

void SharedReduce::initialise(std::span<std::byte> segment, const SharedLayout& layout) {
  if (segment.size() < segment_bytes(layout)) refuse("the segment is too small");
  const Header header{kMagic, layout.epoch,         layout.ranks, layout.depth, layout.buckets,
                      0,      layout.bytes_per_slot};
  std::memcpy(segment.data(), &header, sizeof header);
}

SharedReduce::SharedReduce(std::shared_ptr<void> owner, std::span<std::byte> segment,
                           const SharedLayout& layout, std::uint32_t rank)
    : owner_(std::move(owner)), segment_(segment.data()), layout_(layout), rank_(rank) {
  if (rank >= layout.ranks) refuse("rank " + std::to_string(rank) + " is not in the layout");
  Header header{};
  if (segment.size() >= segment_bytes(layout)) {
    std::memcpy(&header, segment.data(), sizeof header);
  }
  const SharedLayout theirs{header.epoch, header.ranks, header.depth, header.buckets,
                            header.bytes_per_slot};
  if (header.magic != kMagic || theirs != layout) {
    throw Exception(ErrorCode::wire,
                    "the segment that was passed for the allreduce of epoch " +
                        std::to_string(layout.epoch) + " has another layout (epoch " +
                        std::to_string(theirs.epoch) + ", " + std::to_string(theirs.ranks) +
                        " ranks, slots of " + std::to_string(theirs.bytes_per_slot) + " bytes)");
  }
}

SharedReduce::Words& SharedReduce::words(std::uint32_t rank) const {
  return *reinterpret_cast<Words*>(segment_ + kLine * (1 + std::uint64_t{rank}));
}

SharedReduce::Announcement& SharedReduce::announcement(std::uint32_t rank, std::uint64_t s) const {
  return *reinterpret_cast<Announcement*>(segment_ + announcements_at(layout_) +
                                          announcements_stride(layout_) * rank +
                                          kAnnouncementBytes * (s % layout_.depth));
}

std::byte* SharedReduce::input_memory(std::uint32_t rank, std::uint32_t bucket) const {
  return segment_ + inputs_at(layout_) +
         slot_stride(layout_) * (std::uint64_t{rank} * layout_.buckets + bucket);
}

std::byte* SharedReduce::result_memory(std::uint64_t s) const {
  return segment_ + results_at(layout_) + slot_stride(layout_) * (s % layout_.depth);
}

// --- the user's side

std::span<std::byte> SharedReduce::input(std::uint32_t bucket) const {
  if (bucket >= layout_.buckets) refuse("there is no input " + std::to_string(bucket));
  return {input_memory(rank_, bucket), layout_.bytes_per_slot};
}

void SharedReduce::start(SharedOperation operation, const std::vector<std::uint32_t>& buckets,
                         MutableBuffer own) {
  check(operation, buckets, own);
  started_ = operation.s;
  if (operation.whole) last_whole_ = operation.s;
  Running running;
  running.own = std::move(own);
  running.pieces = pieces_of(operation);
  running.reduces = !running.pieces.empty();
  for (const std::uint32_t bucket : buckets) running.buckets |= std::uint64_t{1} << bucket;
  running.operation = std::move(operation);
  running_.push_back(std::move(running));
}

void SharedReduce::check(const SharedOperation& operation,
                         const std::vector<std::uint32_t>& buckets,
                         const MutableBuffer& own) const {
  if (operation.s != started_ + 1) {
    refuse("operation " + std::to_string(operation.s) + " started after " +
           std::to_string(started_));
  }
  for (const SharedSection& section : operation.sections) {
    if (!is_supported(section.dtype, operation.op)) {
      refuse("no " + op_name(operation.op) + " of " +
             std::string(tensor::dtype_name(section.dtype)));
    }
    const std::size_t item = tensor::item_size(section.dtype);
    if (section.offset % item != 0 || section.offset > layout_.bytes_per_slot ||
        section.count > (layout_.bytes_per_slot - section.offset) / item) {
      refuse(std::to_string(section.count) + " elements at " + std::to_string(section.offset) +
             " do not fit into a slot of " + std::to_string(layout_.bytes_per_slot) + " bytes");
    }
  }
  if (!is_rising(operation.contributors, layout_.ranks) ||
      !is_rising(operation.reducers, layout_.ranks) ||
      operation.reducers.empty() != operation.whole || !is_rising(buckets, layout_.buckets)) {
    refuse("ranks and inputs must be rising and within the layout, reducers not empty");
  }
  if (own.size() != (operation.whole ? layout_.bytes_per_slot : 0)) {
    refuse("the result of a whole operation needs memory of a slot's size, no other does");
  }
  if (contains(operation.contributors, rank_) == buckets.empty()) {
    refuse("a contributor has inputs, and nobody else");
  }
}

std::vector<SharedReduce::Piece> SharedReduce::pieces_of(const SharedOperation& operation) const {
  std::vector<Piece> pieces;
  const auto& reducers = operation.reducers;
  if (!operation.whole && !contains(reducers, rank_)) return pieces;
  const auto self = static_cast<std::size_t>(
      std::lower_bound(reducers.begin(), reducers.end(), rank_) - reducers.begin());
  for (const SharedSection& section : operation.sections) {
    const std::size_t item = tensor::item_size(section.dtype);
    const Range slice = operation.whole ? Range{0, section.count}
                                        : slices(section.count, item, reducers.size())[self];
    const std::uint64_t step = kPieceBytes / item;
    for (std::uint64_t begin = slice.begin; begin < slice.end; begin += step) {
      pieces.push_back({section, {begin, std::min(slice.end, begin + step)}});
    }
  }
  std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

std::uint64_t SharedReduce::completed() const {
  std::uint64_t least = words(0).red.load(std::memory_order_acquire);
  for (std::uint32_t rank = 1; rank < layout_.ranks; ++rank) {
    const std::uint64_t red = words(rank).red.load(std::memory_order_acquire);
    least = mutant("complete_when_one_is") ? std::max(least, red) : std::min(least, red);
  }
  // A rank that resumes in an old epoch, or a hostile one, may have stored anything.
  return std::min(least, started_);
}

std::uint64_t SharedReduce::reduced() const {
  return std::min(words(rank_).red.load(std::memory_order_acquire), started_);
}

Buffer SharedReduce::result(std::uint64_t s) const {
  if (s > completed() || s <= released_) {
    refuse("operation " + std::to_string(s) + " has no result here: complete are operations to " +
           std::to_string(completed()) + ", released to " + std::to_string(released_));
  }
  return {owner_, result_memory(s), layout_.bytes_per_slot};
}

void SharedReduce::release(std::uint64_t s) {
  const bool done = s <= completed() || (s <= last_whole_ && s <= reduced());
  if (!done) refuse("operation " + std::to_string(s) + " is not complete");
  if (s <= released_) return;
  released_ = s;
  words(rank_).out.store(s, std::memory_order_seq_cst);
  stored();
}

void SharedReduce::give_up() { words(rank_).left.store(1, std::memory_order_seq_cst); }

bool SharedReduce::given_up() const {
  if (mutant("tell_of_what_was_given_up")) return false;
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (words(rank).left.load(std::memory_order_seq_cst) != 0) return true;
  }
  return false;
}

std::vector<std::uint32_t> SharedReduce::waiting_for() const {
  const std::uint64_t s = completed() + 1;
  if (s > started_) return {};
  std::vector<std::uint32_t> late;      // the others cannot begin before them
  std::vector<std::uint32_t> reducing;  // have all they need
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    const Words& line = words(rank);
    const bool holds_slot = s > layout_.depth && line.out.load() < s - layout_.depth;
    if (holds_slot || line.in.load() < s) late.push_back(rank);
    if (line.red.load() < s) reducing.push_back(rank);
  }
  return late.empty() ? reducing : late;
}

// --- steps

bool SharedReduce::step() {
  if (must_look_) {
    look_for_sleepers();
    return true;
  }
  Running* next = next_to_advance();
  if (next == nullptr) return false;
  switch (next->stage) {
    case Stage::early:
      announce(*next);
      break;
    case Stage::announced:
      check_agreement(*next);
      next->stage = Stage::reducing;
      if (mutant("publish_before_reducing")) words(rank_).red.store(next->operation.s);
      break;
    case Stage::reducing:
      if (!next->pieces.empty()) {
        reduce_next_piece(*next);
      } else {
        words(rank_).red.store(next->operation.s, std::memory_order_seq_cst);
        stored();
        running_.pop_front();
      }
      break;
  }
  return true;
}

// Inputs are announced ahead of the reductions, which run one operation after another.
SharedReduce::Running* SharedReduce::next_to_advance() {
  const auto early = std::find_if(running_.begin(), running_.end(), [](const Running& running) {
    return running.stage == Stage::early;
  });
  if (early != running_.end() && can_advance(*early)) return &*early;
  return !running_.empty() && can_advance(running_.front()) ? &running_.front() : nullptr;
}

void SharedReduce::announce(Running& running) {
  const std::uint64_t s = running.operation.s;
  Announcement& mine = announcement(rank_, s);
  mine.fingerprint.store(fingerprint(running.operation), std::memory_order_relaxed);
  mine.buckets.store(running.buckets, std::memory_order_relaxed);
  words(rank_).in.store(s, std::memory_order_seq_cst);
  running.stage = Stage::announced;
  stored();
}

bool SharedReduce::can_advance(const Running& running) const {
  const SharedOperation& operation = running.operation;
  if (running.stage == Stage::early) {
    // The announcement's slot belongs to operation s - depth until all ranks have reduced that one.
    return operation.s <= layout_.depth || completed() >= operation.s - layout_.depth ||
           mutant("announce_too_early");
  }
  if (running.stage == Stage::reducing || !running.reduces) return true;
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    const Words& line = words(rank);
    const bool holds_slot = !operation.whole && operation.s > layout_.depth &&
                            line.out.load(std::memory_order_seq_cst) < operation.s - layout_.depth;
    if (holds_slot && !mutant("overwrite_unread_result")) return false;
    const bool waits_for_input = contains(operation.contributors, rank) &&
                                 line.in.load(std::memory_order_seq_cst) < operation.s;
    if (waits_for_input && !mutant("reduce_without_inputs")) return false;
  }
  return true;
}

void SharedReduce::check_agreement(const Running& running) const {
  if (!running.reduces) return;
  const std::uint64_t s = running.operation.s;
  for (const std::uint32_t rank : running.operation.contributors) {
    const Announcement& theirs = announcement(rank, s);
    const std::uint64_t buckets = theirs.buckets.load(std::memory_order_relaxed);
    const bool within = layout_.buckets == 64 || buckets >> layout_.buckets == 0;
    if (theirs.fingerprint.load(std::memory_order_relaxed) == fingerprint(running.operation) &&
        buckets != 0 && within) {
      continue;
    }
    if (mutant("reduce_without_inputs")) continue;
    throw Exception(ErrorCode::error,
                    "shared allreduce " + std::to_string(s) + " of epoch " +
                        std::to_string(layout_.epoch) + ": rank " + std::to_string(rank) +
                        " started another operation than rank " + std::to_string(rank_) +
                        ": the members' tensors differ in size or type");
  }
}

std::vector<Buffer> SharedReduce::inputs(const Running& running, std::uint64_t offset,
                                         std::uint64_t bytes) const {
  std::vector<Buffer> found;
  const auto add = [&](std::uint32_t rank) {
    const std::uint64_t announced =
        announcement(rank, running.operation.s).buckets.load(std::memory_order_relaxed);
    const std::uint64_t buckets = mutant("add_everybody") ? 1 : announced;
    for (std::uint32_t bucket = 0; bucket < layout_.buckets; ++bucket) {
      if ((buckets >> bucket & 1) == 0) continue;
      found.emplace_back(owner_, input_memory(rank, bucket) + offset, bytes);
    }
  };
  if (mutant("add_everybody")) {
    for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) add(rank);
  } else {
    for (const std::uint32_t rank : running.operation.contributors) add(rank);
  }
  if (mutant("reduce_in_another_order") && rank_ % 2 == 1) std::reverse(found.begin(), found.end());
  return found;
}

void SharedReduce::reduce_next_piece(Running& running) {
  const Piece piece = running.pieces.back();
  running.pieces.pop_back();
  const SharedOperation& operation = running.operation;
  const std::size_t item = tensor::item_size(piece.section.dtype);
  const std::uint64_t offset = piece.section.offset + piece.range.begin * item;
  const std::uint64_t bytes = piece.range.count() * item;
  const MutableBuffer output =
      operation.whole ? running.own.slice(offset, bytes)
                      : MutableBuffer(owner_, result_memory(operation.s) + offset, bytes);
  std::vector<Buffer> parts = inputs(running, offset, bytes);
  if (parts.empty()) {
    std::memset(output.data(), 0, bytes);
    return;
  }
  run({piece.section.dtype, operation.op, operation.divisor, std::move(parts), output});
}

// --- sleeping

// After every store this rank looks for sleepers, and after every announcement of sleep it looks at
// the stores; all are seq_cst, so that one of the two sees the other.
void SharedReduce::stored() {
  if (!mutant("never_ring")) must_look_ = true;
}

void SharedReduce::look_for_sleepers() {
  must_look_ = false;
  for (std::uint32_t rank = 0; rank < layout_.ranks; ++rank) {
    if (rank == rank_ || words(rank).asleep.load(std::memory_order_seq_cst) == 0) continue;
    if (!contains(wakeups_, rank)) {
      wakeups_.insert(std::lower_bound(wakeups_.begin(), wakeups_.end(), rank), rank);
    }
  }
}

std::vector<std::uint32_t> SharedReduce::take_wakeups() { return std::exchange(wakeups_, {}); }

bool SharedReduce::announce_sleep() {
  seen_completed_ = completed();
  if (seen_completed_ == started_) return false;
  words(rank_).asleep.store(1, std::memory_order_seq_cst);
  return true;
}

bool SharedReduce::may_sleep() {
  if (mutant("sleep_without_a_look")) return true;
  return !must_look_ && completed() == seen_completed_ && next_to_advance() == nullptr;
}

void SharedReduce::awake() { words(rank_).asleep.store(0, std::memory_order_relaxed); }

}  // namespace moolink::collective
