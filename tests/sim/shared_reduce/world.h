#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/shared_reduce.h"
#include "common/sleepers.h"

namespace moolink::sim {

// Ranks that share a segment, interleaved store by store as a seed has it, of which some die.
class SharedReduceWorld : public SleepersWorld {
 public:
  SharedReduceWorld(std::uint64_t seed, bool print);
  void run();

 private:
  // What every rank is told of an operation (the cut of a round).
  struct Operation {
    collective::SharedOperation specification;
    std::map<std::uint32_t, std::vector<std::uint32_t>> buckets;  // once its contributors started

    std::uint64_t elements() const {
      return specification.sections[0].count + specification.sections[1].count;
    }
  };

  struct Rank : Sleeper {
    std::unique_ptr<collective::SharedReduce> reduce;
    std::uint64_t started = 0;
    std::uint64_t verified = 0;
    std::uint64_t released = 0;
    std::map<std::uint64_t, MutableBuffer> own;  // results of whole operations, not released
    std::vector<std::uint64_t> bucket_used_by;   // the last operation that took it
  };

  void make_operations();
  void act(std::uint32_t index);
  bool start_next(std::uint32_t index);
  void step(std::uint32_t index);
  bool fall_asleep(std::uint32_t index);
  void look_at_results(std::uint32_t index);
  void release_one(std::uint32_t index);
  void kill(std::uint32_t index);
  void check_result(std::uint32_t index, std::uint64_t s);
  void check_the_end();
  void wake_the_stopped(std::uint64_t completed);
  bool finished() const;
  bool can_start(const Rank& rank) const;
  bool has_next(const Rank& rank) const;
  bool stuck() const;
  std::vector<float> expected(std::uint64_t s) const;
  float value(std::uint32_t rank, std::uint64_t s, std::uint32_t bucket, std::uint64_t i) const;

  collective::SharedLayout layout_;
  std::shared_ptr<void> memory_;
  std::vector<Operation> operations_;  // operations_[s - 1]
  std::vector<Rank> ranks_;
  bool deaths_ = false;
};

}  // namespace moolink::sim
