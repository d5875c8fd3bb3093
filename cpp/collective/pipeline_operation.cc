#include "collective/pipeline_operation.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <string>

#include "base/error.h"

namespace moolink::collective {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw Exception(ErrorCode::invalid_argument, "shared pipeline: " + why);
}

bool is_rising(const std::vector<std::uint32_t>& ranks, std::uint32_t limit) {
  return std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end() &&
         (ranks.empty() || ranks.back() < limit);
}

}  // namespace

bool PipelineOperation::contributes(std::uint32_t rank) const {
  return !contributors || std::ranges::binary_search(*contributors, rank);
}

// FNV-1a over words.
std::uint64_t PipelineOperation::fingerprint() const {
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

void check(const PipelineOperation& operation, std::uint32_t ranks, std::uint32_t rank) {
  const Passage& passage = operation.passage;
  if (passage.ranks != ranks || passage.root >= ranks ||
      passage.item_size != tensor::item_size(operation.dtype)) {
    refuse("an operation of " + std::to_string(passage.ranks) + " ranks with root " +
           std::to_string(passage.root) + " among " + std::to_string(ranks));
  }
  const bool reduced = reduces(passage.kind);
  if (reduced && !is_supported(operation.dtype, operation.op)) {
    refuse("no " + op_name(operation.op) + " of " +
           std::string(tensor::dtype_name(operation.dtype)));
  }
  if (operation.contributors) {
    const std::vector<std::uint32_t>& contributors = *operation.contributors;
    const bool none = contributors.empty() && !operation.exchanged;
    if (!reduced || none || !is_rising(contributors, ranks)) refuse("wrong contributors");
  }
  if (passage.owners > ranks || (operation.exchanged && passage.kind != Kind::all_reduce)) {
    refuse("wrong owners of slices");
  }
  if (operation.abandoned) return;
  const std::size_t given = operation.inputs.size();
  if (operation.contributes(rank) == (given == 0) || (given > 1 && !reduced)) {
    refuse(std::to_string(given) + " inputs of rank " + std::to_string(rank));
  }
  if (operation.lent.segment != 0 && (passage.kind != Kind::all_reduce || given != 1)) {
    refuse("only the input of an allreduce can be lent");
  }
  const bool fits = std::ranges::all_of(operation.inputs, [&](const Buffer& input) {
    return input.size() == input_bytes(passage, rank);
  });
  if (!fits || operation.output.size() != output_bytes(passage, rank)) {
    refuse("its memory does not fit the operation");
  }
}

}  // namespace moolink::collective
