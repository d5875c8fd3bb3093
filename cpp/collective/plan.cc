#include "collective/plan.h"

#include <algorithm>

namespace moolink::collective {

std::vector<Range> slices(std::uint64_t count, std::size_t item_size, std::size_t owners) {
  constexpr std::uint64_t kLine = 64;
  std::vector<Range> ranges(owners);
  if (owners == 0) return ranges;
  const std::uint64_t line = std::max<std::uint64_t>(1, kLine / item_size);  // elements
  std::uint64_t each = (count + owners - 1) / owners;
  each = (each + line - 1) / line * line;
  if (count <= kSmallBytes / item_size) each = count;
  std::uint64_t begin = 0;
  for (Range& range : ranges) {
    range.begin = begin;
    begin = std::min(count, begin + each);
    range.end = begin;
  }
  return ranges;
}

}  // namespace moolink::collective
