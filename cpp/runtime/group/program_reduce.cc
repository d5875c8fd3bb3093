#include "runtime/group/program_reduce.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "io/loop.h"

namespace moolink::runtime {
namespace {

// Memory that is gone once the program continues. A successful operation has no reference to it any
// more; a failed one may have tasks under way, arithmetic and copies of at most some milliseconds.
// This waits for them without a limit: its buffers share an owner, whose destruction marks their
// end.
class ProgramMemory {
 public:
  ProgramMemory()
      : owner_(state_.get(), [state = state_](void*) {
          const std::lock_guard guard(state->mutex);
          state->returned = true;
          state->changed.notify_all();
        }) {}
  ~ProgramMemory() {
    owner_.reset();
    if (ended_well_) return;
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->returned; });
  }
  ProgramMemory(const ProgramMemory&) = delete;
  ProgramMemory& operator=(const ProgramMemory&) = delete;

  void ended_well() { ended_well_ = true; }

  Buffer input(const ProgramOperand& operand) const {
    return {owner_, operand.input, operand.bytes};
  }
  MutableBuffer output(const ProgramOperand& operand) const {
    return {owner_, operand.output, operand.bytes};
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool returned = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::shared_ptr<void> owner_;
  bool ended_well_ = false;
};

// The operands of one dtype: one operation.
struct Part {
  tensor::DType dtype = tensor::DType::uint8;
  std::vector<const ProgramOperand*> operands;
  std::size_t bytes = 0;
  MutableBuffer packed;  // the result of several, side by side
  std::shared_ptr<Future> future;
};

std::vector<Part> parts_of(std::span<const ProgramOperand> operands) {
  std::vector<Part> parts;
  for (const ProgramOperand& operand : operands) {
    auto part =
        std::ranges::find_if(parts, [&](const Part& one) { return one.dtype == operand.dtype; });
    if (part == parts.end()) part = parts.insert(parts.end(), Part{operand.dtype, {}, 0, {}, {}});
    part->operands.push_back(&operand);
    part->bytes += operand.bytes;
  }
  return parts;
}

void check_retry(const ProgramReduction& reduction, const std::vector<Part>& parts) {
  if (!reduction.retry) return;
  const char* reason = nullptr;
  if (parts.size() > 1) {
    reason = "elements of several dtypes, whose operations could end among different members";
  }
  for (const Part& part : parts) {
    for (const ProgramOperand* operand : part.operands) {
      if (operand->bytes != 0 && operand->input == operand->output) {
        reason = "donated operands, which are gone when an operation begins again";
      }
    }
  }
  if (reason == nullptr) return;
  throw Exception(ErrorCode::invalid_argument,
                  "all_reduce '" + reduction.name + "': on_change=\"retry\" is not for " + reason);
}

MutableBuffer pack(const Part& part, Allocator& pool) {
  const MutableBuffer packed = pool.allocate(part.bytes);
  std::byte* to = packed.data();
  for (const ProgramOperand* operand : part.operands) {
    if (operand->bytes != 0) std::memcpy(to, operand->input, operand->bytes);
    to += operand->bytes;
  }
  return packed;
}

void unpack(const Part& part) {
  const std::byte* from = part.packed.data();
  for (const ProgramOperand* operand : part.operands) {
    if (operand->bytes != 0) std::memcpy(operand->output, from, operand->bytes);
    from += operand->bytes;
  }
}

void start(GroupPeer& group, const ProgramReduction& reduction, std::size_t number, Part& part,
           const ProgramMemory& memory) {
  collective::OpSpec spec;
  spec.op = reduction.op;
  spec.dtype = part.dtype;
  spec.shape = {static_cast<std::int64_t>(part.bytes / tensor::item_size(part.dtype))};
  spec.layout = reduction.layout;
  Allocator& pool = group.rpc()->context()->pool();
  const bool alone = part.operands.size() == 1;
  // Messages to other hosts may stay in queues for longer than the program lives. A retry may be
  // among members of several hosts.
  const bool lent =
      alone && !reduction.retry && part.bytes >= collective::kSharedBytes && group.on_one_host();
  Buffer input = lent ? memory.input(*part.operands.front()) : Buffer(pack(part, pool));
  if (!alone) part.packed = pool.allocate(part.bytes);
  MutableBuffer output = alone ? memory.output(*part.operands.front()) : part.packed;
  const std::string name =
      number == 0 ? reduction.name : reduction.name + ", part " + std::to_string(number + 1);
  part.future = group.collective(name, std::move(spec), std::move(input), std::move(output), lent,
                                 reduction.retry, reduction.epoch);
}

// The first error that is not a consequence of another one.
const Error* first_error(const std::vector<Part>& parts) {
  const Error* found = nullptr;
  for (const Part& part : parts) {
    if (!part.future || !part.future->done()) continue;
    const Error* error = std::get_if<Error>(&part.future->outcome());
    if (error == nullptr) continue;
    if (found == nullptr || found->code == ErrorCode::cancelled) found = error;
  }
  return found;
}

// On an error, cancels operations that have started and not ended.
struct CancelUnended {
  std::vector<Part>& parts;
  ~CancelUnended() {
    for (const Part& part : parts) {
      if (part.future && !part.future->done()) part.future->cancel();
    }
  }
};

}  // namespace

void reduce_for_program(GroupPeer& group, const ProgramReduction& reduction,
                        std::span<const ProgramOperand> operands,
                        const Engine::Interrupt& interrupt) {
  ProgramMemory memory;  // outlives all references to it
  std::vector<Part> parts = parts_of(operands);
  check_retry(reduction, parts);
  const CancelUnended cancel{parts};
  for (std::size_t i = 0; i < parts.size(); ++i) start(group, reduction, i, parts[i], memory);
  for (const Part& part : parts) {
    part.future->wait(kNever, interrupt);
    if (std::holds_alternative<Error>(part.future->outcome())) break;
  }
  if (const Error* found = first_error(parts)) {
    Error error = *found;
    if (error.message.find("'" + reduction.name) == std::string::npos) {
      error.message = "all_reduce '" + reduction.name + "': " + error.message;
    }
    throw Exception(std::move(error));
  }
  for (const Part& part : parts) {
    if (!part.packed.empty()) unpack(part);
  }
  memory.ended_well();
}

}  // namespace moolink::runtime
