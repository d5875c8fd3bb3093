#pragma once

// Allreduces that compiled programs call: they block, and the program owns their memory.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "runtime/group/group_peer.h"

namespace moolink::runtime {

// One operand and its result, of the same size; they may be the same memory.
struct ProgramOperand {
  tensor::DType dtype = tensor::DType::uint8;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::size_t bytes = 0;
};

struct ProgramReduction {
  std::string name;
  collective::ReduceOp op = collective::ReduceOp::sum;
  std::string layout;  // of all operands, in the form of eager operations
  bool retry = false;
  std::uint32_t epoch = 0;  // the low bits of the program's epoch at dispatch; 0: any
};

// Starts one operation for the operands of each dtype, in the order in which dtypes first occur,
// and waits for all. No reference to the program's memory is left when this returns or throws.
// Throws Exception, and the exceptions of `interrupt`.
void reduce_for_program(GroupPeer& group, const ProgramReduction& reduction,
                        std::span<const ProgramOperand> operands,
                        const Engine::Interrupt& interrupt);

}  // namespace moolink::runtime
