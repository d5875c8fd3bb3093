#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "collective/passage.h"
#include "collective/pipeline_operation.h"
#include "collective/pipeline_segment.h"

namespace moolink::collective {

// Collectives of any size among the ranks of one host, in chunks that pass through small windows of
// a shared segment, so that the data stays in the cache. Inputs and outputs are the callers' own
// memory; if the other ranks can read it, an allreduce's input needs no window.
// docs/design/protocol/shared_memory.md has the words, stages and invariants.

// A segment lent by another rank, as it is mapped here; null: it is not.
using LentMemory = std::function<LentBytes(std::uint32_t rank, std::uint64_t segment)>;

class SharedPipeline {
 public:
  struct Ended {
    std::uint64_t s = 0;
    bool abandoned = false;  // some rank abandoned it: the output is meaningless
  };
  // This host's sum of this rank's slice of a chunk, which is counted from the operation's first.
  struct Sum {
    std::uint64_t s = 0;
    std::uint32_t chunk = 0;
    Buffer elements;
  };

  // `memory` is for sums, and must outlive this.
  SharedPipeline(PipelineSegment segment, std::uint32_t rank, Allocator& memory,
                 LentMemory lent = {});

  // Keeps references to the memory until Ended. Throws Exception{invalid_argument} if the operation
  // before it has not started: its chunks would have other numbers than at other ranks.
  void start(PipelineOperation operation);
  // Abandons this rank's part: its memory is neither read nor written from now on, and the outcome
  // is meaningless at ranks that did not have all data yet. The operation still passes through.
  void abandon(std::uint64_t s);
  // This rank leaves and does nothing more: its lent memory is its users' again.
  void withdraw();

  // One action: a store, a look for sleepers, or copying or reducing one piece. False: nothing to
  // do until another rank stores something. Throws Exception{error} that names the rank if another
  // one has started a different operation.
  bool step();
  // Operations that have ended here, in their order.
  std::vector<Ended> take_ended() { return std::exchange(ended_, {}); }
  // Sums of exchanged operations. No sum includes an abandoned input.
  std::vector<Sum> take_sums() { return std::exchange(sums_, {}); }
  // The result of a Sum over all hosts. Ignored if the operation was abandoned here.
  void publish(std::uint64_t s, std::uint32_t chunk, Buffer result);

  // This rank is in a newer epoch: operations that end after this are discarded.
  void give_up() { segment_.words(rank_).left.store(1, std::memory_order_seq_cst); }
  bool given_up() const;

  // Ranks that wait for a store of this rank: ring their doorbells. Empties the list.
  std::vector<std::uint32_t> take_wakeups() { return std::exchange(wakeups_, {}); }
  // Sleeping: announce, look once more, and sleep until the doorbell rings only if there is nothing
  // to do. announce_sleep() returns whether this rank waits for any other at all.
  bool announce_sleep();
  bool may_sleep();
  void awake() { segment_.words(rank_).asleep.store(0, std::memory_order_relaxed); }

  bool idle() const { return running_.empty(); }
  // No rank needs anything more from this one for the operations started here.
  bool taken_by_all() const { return segment_.least(kTake) >= last_chunk_; }
  // Something was stored, and step() has not looked for ranks to wake yet.
  bool must_look() const { return must_look_; }
  // Ranks for which the operation under way waits.
  std::vector<std::uint32_t> waiting_for() const;
  const PipelineLayout& layout() const { return segment_.layout(); }
  std::uint32_t rank() const { return rank_; }

 private:
  struct Lent {  // a rank's input, and its output too unless only the input
    LentBytes memory;
    std::uint64_t offset = 0;
    bool input_only = false;
  };
  struct Running {
    PipelineOperation operation;
    std::uint64_t first = 0;  // the number of its first chunk
    std::uint64_t chunks = 0;
    std::map<std::uint32_t, Buffer> results = {};  // of an exchanged one, by chunk, until in place
    std::map<std::uint32_t, Lent> lent = {};       // by rank
    bool taken = false;                            // all of it
    bool meaningless = false;                      // some rank had abandoned it by then

    std::uint64_t last() const { return first + chunks - 1; }
    std::uint32_t number(std::uint64_t chunk) const {  // of its own
      return static_cast<std::uint32_t>(chunk - first);
    }
    bool is_lent() const { return operation.lent.segment != 0 && !operation.abandoned; }
    bool is_read_in_place() const { return is_lent() && operation.in_place(); }
  };
  // The progress of one stage.
  struct Cursor {
    std::uint64_t next = 1;  // chunk
    std::size_t part = 0;    // finished part of it
    ChunkPlan plan;
    std::uint64_t planned = 0;  // the chunk that `plan` is of
  };

  // The condition of a stage: a word of all ranks that reaches a chunk. 0: none.
  struct Need {
    Stage word = kPut;
    std::uint64_t chunk = 0;
  };
  using Needs = std::array<Need, 2>;

  const std::byte* part_of(Stage stage, const Running& running, std::uint64_t chunk,
                           const Move& move) const;
  void find_lent(Running& running) const;
  Running* running_at(std::uint64_t chunk);
  bool follows(Stage stage, std::uint64_t chunk) const;
  bool is_written(const Running& running, std::uint64_t chunk) const;
  void skip_sums();
  Needs needs(Stage stage);
  bool is_met(const Need& need) const {
    return need.chunk == 0 || segment_.least(need.word) >= need.chunk;
  }
  bool is_ready(Stage stage);
  void advance(Stage stage);
  bool do_part(Stage stage, Running& running, const Cursor& cursor);
  void check_agreement(const Running& running) const;
  bool put_part(const Running& running, const Cursor& cursor);
  SumTask sum_of_inputs(const Running& running, const Cursor& cursor, std::byte* combined) const;
  bool reduce_part(const Running& running, const Cursor& cursor);
  bool sum_part(Running& running, const Cursor& cursor);
  bool place_part(const Running& running, const Cursor& cursor);
  static void combine_own(const PipelineOperation& operation, const Move& move, std::byte* to);
  void to_user(const PipelineOperation& operation, std::byte* to, const std::byte* from,
               std::uint64_t bytes) const;
  bool take_part(const Running& running, const Cursor& cursor);
  void post(Stage stage, Running& running);
  void publish_status(const Running& running);
  bool may_end() const;
  void end();
  void look_for_sleepers();

  const PipelineSegment segment_;
  const std::uint32_t rank_;
  Allocator& memory_;
  const LentMemory lent_;
  std::uint64_t started_ = 0;     // operations
  std::uint64_t last_chunk_ = 0;  // of the last operation started
  Cursor cursors_[4];             // by stage
  bool must_look_ = false;        // something was stored since the last look for sleepers
  std::deque<Running> running_;
  std::vector<Ended> ended_;
  std::vector<Sum> sums_;
  std::vector<std::uint32_t> wakeups_;
};

}  // namespace moolink::collective
