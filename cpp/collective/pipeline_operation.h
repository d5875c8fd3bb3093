#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/buffer.h"
#include "base/progress.h"
#include "collective/kernels.h"
#include "collective/passage.h"
#include "tensor/dtype.h"

namespace moolink::collective {

// The place of an operation's memory in the memory that its rank has lent to all others.
struct LentPlace {
  std::uint64_t segment = 0;  // 0: nowhere
  std::uint64_t offset = 0;
};

// Operation s of a SharedPipeline. Every rank starts operations in the order of s. The fields that
// fingerprint() covers are the same on every rank. Engine::start() has checked the others.
struct PipelineOperation {
  std::uint64_t s = 0;
  Passage passage;
  tensor::DType dtype = tensor::DType::uint8;
  ReduceOp op = ReduceOp::sum;
  double divisor = 1;
  // The ranks whose inputs are reduced, in ascending order; none: all.
  std::optional<std::vector<std::uint32_t>> contributors = {};
  // An allreduce over several hosts; the ranks are those of this host. The owner of a slice passes
  // its sum of the inputs here, of partial_dtype(), to take_sums() of SharedPipeline, and puts the
  // result from publish() in place. All hosts have the same number of owners. If no rank here
  // contributes, the sum is zero.
  bool exchanged = false;
  // Each of input_bytes() of the passage; none at a rank that contributes nothing. If the operation
  // reduces, there may be several, which this rank combines first.
  std::vector<Buffer> inputs = {};
  Written written = {};       // how far the inputs of an all_reduce are written
  MutableBuffer output = {};  // output_bytes(); may be the input for all_reduce and broadcast
  // For an all_reduce with one input: the others read it there, and in_place() also the output.
  LentPlace lent = {};
  bool abandoned = false;  // before its start, so it has no memory

  bool contributes(std::uint32_t rank) const {
    return !contributors || std::ranges::binary_search(*contributors, rank);
  }
  // The output is the only input's memory.
  bool in_place() const {
    return inputs.size() == 1 && !output.empty() && inputs.front().data() == output.data();
  }
  // A hash of all that the ranks must agree on: FNV-1a over words.
  std::uint64_t fingerprint() const {
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    const auto add = [&hash](std::uint64_t word) { hash = (hash ^ word) * 0x100000001b3ULL; };
    add(static_cast<std::uint64_t>(passage.kind));
    add(passage.root);
    add(passage.count);
    add(static_cast<std::uint64_t>(dtype));
    add(static_cast<std::uint64_t>(op));
    add(std::bit_cast<std::uint64_t>(divisor));
    add(passage.owners);
    add(exchanged ? 1 : 0);
    add(contributors ? 1 : 0);
    for (const std::uint32_t rank : contributors.value_or(std::vector<std::uint32_t>())) add(rank);
    return hash;
  }
};

}  // namespace moolink::collective
