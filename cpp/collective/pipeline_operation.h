#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "collective/kernels.h"
#include "collective/plan.h"
#include "tensor/dtype.h"

namespace moolink::collective {

// The place of an operation's memory in what its rank has lent to all others.
struct LentPlace {
  std::uint64_t segment = 0;  // 0: nowhere
  std::uint64_t offset = 0;
};

// Operation s of a SharedPipeline, started in this order by every rank; everything but the memory
// is the same on each.
struct PipelineOperation {
  std::uint64_t s = 0;
  Passage passage;
  tensor::DType dtype = tensor::DType::uint8;
  ReduceOp op = ReduceOp::sum;
  double divisor = 1;
  // The ranks whose inputs are reduced, rising; empty: all.
  std::vector<std::uint32_t> contributors = {};
  // Of input_bytes() of the passage; none of a rank that contributes nothing. What is reduced may
  // have several, which are combined here first.
  std::vector<Buffer> inputs = {};
  MutableBuffer output = {};  // output_bytes(); may be the input's for all_reduce and broadcast
  // Of an all_reduce: the others read the only input where it is, and in place the output too.
  LentPlace lent = {};
  bool abandoned = false;  // abandoned before it began: without memory

  bool contributes(std::uint32_t rank) const;
  // The output is the only input's memory.
  bool in_place() const;
  // What ranks must agree on, in one word.
  std::uint64_t fingerprint() const;
};

// Throws Exception{invalid_argument} if this rank cannot start it.
void check(const PipelineOperation& operation, std::uint32_t ranks, std::uint32_t rank);

}  // namespace moolink::collective
