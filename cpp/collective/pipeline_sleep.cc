// The sleep of a rank of a shared pipeline, and the search for ranks to ring.

#include <algorithm>
#include <array>

#include "collective/shared_pipeline.h"

namespace moolink::collective {

// After every store this rank looks for sleepers, and after every announcement of sleep it looks at
// the stores; all are seq_cst, so that of the sleeper and the last rank it waits for, at least one
// sees the other.
void SharedPipeline::look_for_sleepers() {
  must_look_ = false;
  const std::array<std::uint64_t, 3> all{segment_.least(kPut), segment_.least(kReduce),
                                         segment_.least(kTake)};
  for (std::uint32_t rank = 0; rank < layout().ranks; ++rank) {
    const PipelineSegment::Words& line = segment_.words(rank);
    if (rank == rank_ || line.asleep.load(std::memory_order_seq_cst) == 0) continue;
    for (std::size_t word = 0; word < all.size(); ++word) {
      const std::uint64_t wanted = line.wanted[word].load(std::memory_order_relaxed);
      if (wanted == 0 || all[word] < wanted) continue;
      wakeups_.push_back(rank);
      break;
    }
  }
}

bool SharedPipeline::announce_sleep() {
  if (running_.empty()) return false;
  std::array<std::uint64_t, 3> wanted{};
  const auto want = [&wanted](const Need& need) {  // the earliest event wakes this rank
    std::uint64_t& chunk = wanted[need.word];
    chunk = chunk == 0 ? need.chunk : std::min(chunk, need.chunk);
  };
  for (const Stage stage : {kPut, kSum, kReduce, kTake}) {
    const std::uint64_t chunk = cursors_[stage].next;
    // A stage that waits for the one before it wakes with that one, and one that waits for other
    // hosts wakes with their messages.
    if (chunk > last_chunk_ || !follows(stage, chunk)) continue;
    for (const Need& need : needs(stage)) {
      if (!is_met(need)) want(need);
    }
  }
  if (running_.front().taken) want({kTake, running_.front().last()});
  PipelineSegment::Words& mine = segment_.words(rank_);
  for (std::size_t word = 0; word < wanted.size(); ++word) {
    mine.wanted[word].store(wanted[word], std::memory_order_relaxed);
  }
  mine.asleep.store(1, std::memory_order_seq_cst);
  return true;
}

bool SharedPipeline::may_sleep() {
  const auto ready = [this](Stage stage) { return is_ready(stage); };
  return !must_look_ && !may_end() &&
         std::ranges::none_of(std::array{kTake, kReduce, kSum, kPut}, ready);
}

}  // namespace moolink::collective
