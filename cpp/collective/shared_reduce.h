#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "collective/kernels.h"
#include "collective/plan.h"
#include "tensor/dtype.h"

namespace moolink::collective {

// Allreduce among the ranks of one host through a segment that all of them map: no message, no
// lock, no shared counter. docs/design/protocol/shared_memory.md has its states and invariants.
//
// The segment holds a header, for each rank a line of words that only this rank writes, each rank's
// announcements of its operations, and memory: input[rank][bucket] and result[slot], with slot = s
// mod depth for operation s = 1, 2, 3 ... A rank that dies at any instruction is a store that never
// comes: the others wait, and give the segment up when the group tells them.

// The same on every rank of a segment.
struct SharedLayout {
  std::uint64_t epoch = 0;
  std::uint32_t ranks = 0;
  std::uint32_t depth = 0;           // the most results kept and operations under way
  std::uint32_t buckets = 0;         // inputs of each rank
  std::uint64_t bytes_per_slot = 0;  // of an input or a result

  bool operator==(const SharedLayout&) const = default;
};

inline constexpr std::uint32_t kMaxSharedRanks = 1024;
inline constexpr std::uint32_t kMaxSharedDepth = 64;
inline constexpr std::uint32_t kMaxSharedBuckets = 64;

// Elements of one type within an input, and at the same place within the result.
struct SharedSection {
  tensor::DType dtype = tensor::DType::float32;
  std::uint64_t offset = 0;  // bytes
  std::uint64_t count = 0;   // elements
};

struct SharedOperation {
  std::uint64_t s = 0;
  ReduceOp op = ReduceOp::sum;
  double divisor = 1;
  std::vector<SharedSection> sections;
  std::vector<std::uint32_t> contributors;  // ranks whose inputs are reduced, rising; none: zeros
  std::vector<std::uint32_t> reducers;      // ranks that reduce a slice each, rising, at least one
  // Every rank reduces all of it into its own memory instead: less work and fewer waits for two
  // ranks, because none copies a result out of the segment. There are no reducers then.
  bool whole = false;
};

class SharedReduce {
 public:
  // Bytes of a segment; throws Exception{invalid_argument} if the layout is beyond the limits.
  static std::uint64_t segment_bytes(const SharedLayout& layout);
  // Writes the header of a new segment, which is all zero; called by the rank that made it, before
  // it passes the segment on.
  static void initialise(std::span<std::byte> segment, const SharedLayout& layout);

  // `owner` keeps the segment mapped. Throws Exception{wire} if the segment has another layout:
  // another epoch, another size.
  SharedReduce(std::shared_ptr<void> owner, std::span<std::byte> segment,
               const SharedLayout& layout, std::uint32_t rank);

  // This rank's memory for a contribution. It may be written after the last operation that took it
  // is complete and before the next one starts.
  std::span<std::byte> input(std::uint32_t bucket) const;
  // Every rank starts the operations in order, with the same specification; `buckets` are this
  // rank's inputs, rising, written before, empty if it is no contributor. An operation started too
  // early (operation s - depth is not complete, or not released here) waits by itself. `own`, of
  // bytes_per_slot bytes, takes the result of a whole operation. Throws Exception{invalid_argument}
  // for an invalid operation.
  void start(SharedOperation operation, const std::vector<std::uint32_t>& buckets,
             MutableBuffer own = {});

  // One action of the operations under way: a store, a look at the others' words, or the reduction
  // of one piece. False: nothing to do until another rank stores something. Throws Exception{error}
  // that names the rank if another one started something else.
  bool step();

  // Operations 1 .. completed() have their result in the segment (a whole one: at every rank), the
  // same for all. Their inputs are not read any more.
  std::uint64_t completed() const;
  // Operations 1 .. reduced() are done here: a whole one's result is in this rank's memory.
  std::uint64_t reduced() const;
  // Of an operation that is complete and was not released here.
  Buffer result(std::uint64_t s) const;
  // This rank does not need the results of operations up to s any more. As after every store, a
  // step() finds the ranks that sleep until then.
  void release(std::uint64_t s);

  // This rank is in a newer epoch: operations that end after this are discarded.
  void give_up();
  // Another rank is. Check this after reading a result and before using it: a rank that was stopped
  // and taken for dead could still end an operation that the others have started again.
  bool given_up() const;

  // Ranks that wait for a store of this rank: ring their doorbells. Empties the list.
  std::vector<std::uint32_t> take_wakeups();
  // Sleeping: announce, look once more, and sleep until the doorbell rings only if there is nothing
  // to do. announce_sleep() returns whether this rank waits for any other at all.
  bool announce_sleep();
  bool may_sleep();
  void awake();

  // The ranks that operation completed() + 1 waits for.
  std::vector<std::uint32_t> waiting_for() const;
  const SharedLayout& layout() const { return layout_; }
  std::uint32_t rank() const { return rank_; }

 private:
  struct Words;
  struct Announcement;
  enum class Stage : std::uint8_t { early, announced, reducing };

  // Reduced in one step, so that the caller never waits long.
  struct Piece {
    SharedSection section;
    Range range;
  };

  struct Running {
    SharedOperation operation;
    std::uint64_t buckets = 0;  // bit map of this rank's inputs
    std::vector<Piece> pieces;  // of this rank's slices, last first
    MutableBuffer own;          // takes the result of a whole operation
    bool reduces = false;       // this rank has slices
    Stage stage = Stage::early;
  };

  Words& words(std::uint32_t rank) const;
  Announcement& announcement(std::uint32_t rank, std::uint64_t s) const;
  std::byte* input_memory(std::uint32_t rank, std::uint32_t bucket) const;
  std::byte* result_memory(std::uint64_t s) const;

  Running* next_to_advance();
  void announce(Running& running);
  void reduce_next_piece(Running& running);
  void check_agreement(const Running& running) const;
  std::vector<Buffer> inputs(const Running& running, std::uint64_t offset,
                             std::uint64_t bytes) const;
  void check(const SharedOperation& operation, const std::vector<std::uint32_t>& buckets,
             const MutableBuffer& own) const;
  std::vector<Piece> pieces_of(const SharedOperation& operation) const;
  bool can_advance(const Running& running) const;
  void stored();
  void look_for_sleepers();

  std::shared_ptr<void> owner_;
  std::byte* segment_;
  const SharedLayout layout_;
  const std::uint32_t rank_;
  std::uint64_t started_ = 0;
  std::uint64_t released_ = 0;
  std::uint64_t last_whole_ = 0;      // started
  std::uint64_t seen_completed_ = 0;  // when last looked before sleeping
  bool must_look_ = false;            // something was stored since the last look for sleepers
  std::deque<Running> running_;
  std::vector<std::uint32_t> wakeups_;
};

}  // namespace moolink::collective
