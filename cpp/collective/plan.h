#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moolink::collective {

// Elements [begin, end) of a tensor.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t count() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool operator==(const Range&) const = default;
};

// Which elements each of `owners` members reduces: contiguous ranges in the owners' order that
// cover all elements once. Tensors of at most kSmallBytes are reduced by the first owner alone,
// because messages cost more than their bytes then; larger ones are cut evenly at multiples of a
// cache line, so that no two ranges share one. The first range is the only one that may be empty
// and still take part: its owner sees every contributor, and so any disagreement, in every plan.
std::vector<Range> slices(std::uint64_t count, std::size_t item_size, std::size_t owners);

inline constexpr std::size_t kSmallBytes = 4096;

}  // namespace moolink::collective
