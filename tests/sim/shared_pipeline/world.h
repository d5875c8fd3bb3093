#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collective/shared_pipeline.h"
#include "common/sleepers.h"

namespace moolink::sim {

// Ranks that share a segment, interleaved store by store as a seed has it: some die, some are
// stopped and wake up in a later epoch, some give operations up.
class SharedPipelineWorld : public SleepersWorld {
 public:
  SharedPipelineWorld(std::uint64_t seed, bool print);
  void run();

 private:
  struct Operation {
    collective::PipelineOperation specification;
    bool abandoned = false;             // by some rank
    std::vector<std::uint64_t> inputs;  // their number at each rank
  };

  // A sum that other hosts have to add to.
  struct Exchanged {
    std::uint32_t rank = 0;
    collective::SharedPipeline::Sum sum;
  };

  // An input of a running operation that is still being written.
  struct Unwritten {
    std::uint64_t s = 0;
    MutableBuffer memory;
    Buffer content;
    std::shared_ptr<Progress> progress;
  };

  struct Rank : Sleeper {
    std::unique_ptr<collective::SharedPipeline> pipeline;
    std::uint64_t started = 0;
    std::uint64_t ended = 0;
    std::vector<MutableBuffer> outputs;   // of each operation
    std::vector<MutableBuffer> lent;      // of each: memory that others may read, or empty
    std::vector<std::uint64_t> given_up;  // by this rank
    std::vector<Unwritten> unwritten;
  };

  void make_operations();
  void act(std::uint32_t index);
  bool start_next(std::uint32_t index);
  void leave_unwritten(Rank& rank, collective::PipelineOperation& operation,
                       const std::vector<MutableBuffer>& inputs);
  void write_on(std::uint32_t index);
  void step(std::uint32_t index);
  void take_ended(std::uint32_t index, bool woken);
  void abandon_one(std::uint32_t index);
  void abandon(std::uint32_t index, std::uint64_t s);
  void take_sums(std::uint32_t index);
  bool exchange_one();
  float sum_here(std::uint64_t s, std::uint64_t i) const;
  float theirs(std::uint64_t s, std::uint64_t i) const;
  bool fall_asleep(std::uint32_t index);
  void kill(std::uint32_t index);
  void close(std::uint32_t index);
  void check_result(std::uint32_t index, std::uint64_t s);
  std::span<const std::byte> lent(std::uint32_t rank, std::uint64_t number) const;
  void spoil(std::uint32_t index, std::uint64_t s);
  void wake_the_stopped();
  bool finished() const;
  bool stuck() const;
  float value(std::uint32_t rank, std::uint64_t s, std::uint64_t i, std::uint64_t number = 0) const;
  float share(std::uint32_t rank, std::uint64_t s, std::uint64_t i) const;
  std::vector<float> input(std::uint32_t rank, const collective::PipelineOperation& of,
                           std::uint64_t number) const;
  std::uint64_t inputs_of(std::uint32_t rank, std::uint64_t s) const;
  std::vector<float> expected(std::uint32_t rank, std::uint64_t s) const;

  collective::PipelineLayout layout_;
  std::shared_ptr<void> memory_;
  std::vector<Operation> operations_;  // operations_[s - 1]
  std::vector<Rank> ranks_;
  HeapAllocator heap_;
  std::vector<Exchanged> exchanged_;  // under way to other hosts and back
  bool deaths_ = false;
  bool gives_up_ = false;
};

}  // namespace moolink::sim
