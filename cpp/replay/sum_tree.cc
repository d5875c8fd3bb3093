#include "replay/sum_tree.h"

#include <algorithm>
#include <utility>

#include "base/round_up.h"

namespace moolink::replay {

double SumTree::Node::total() const {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void SumTree::resize(std::size_t leaves) {
  if (!levels_.empty() && leaves <= levels_.front().size() * kChildren) return;
  std::vector<Level> levels(1);
  if (!levels_.empty()) levels.front() = levels_.front();
  const std::size_t nodes = round_up(leaves, kChildren) / kChildren;
  levels.front().resize(std::max(nodes, 2 * levels.front().size()));
  do {
    const Level& below = levels.back();
    Level level(round_up(below.size(), kChildren) / kChildren);
    for (std::size_t i = 0; i < below.size(); ++i) {
      level[i / kChildren].sums[i % kChildren] = below[i].total();
    }
    levels.push_back(std::move(level));
  } while (levels[levels.size() - 2].size() > 1);
  levels_ = std::move(levels);
}

void SumTree::set(std::span<const std::uint32_t> leaves, std::span<const double> weights) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    levels_.front()[leaves[i] / kChildren].sums[leaves[i] % kChildren] = weights[i];
  }
  changed_.assign(leaves.begin(), leaves.end());
  for (std::size_t level = 1; level < levels_.size(); ++level) {
    std::size_t kept = 0;
    for (const std::uint32_t child : changed_) {
      const auto parent = static_cast<std::uint32_t>(child / kChildren);
      if (kept > 0 && changed_[kept - 1] == parent) continue;  // neighbours are changed together
      levels_[level][parent / kChildren].sums[parent % kChildren] =
          levels_[level - 1][parent].total();
      changed_[kept++] = parent;
    }
    changed_.resize(kept);
  }
}

// All points go down by one level at a time, so that their cache misses overlap.
void SumTree::find(std::span<double> points, std::span<std::uint32_t> found) const {
  std::fill(found.begin(), found.end(), 0);
  for (std::size_t level = levels_.size() - 1; level-- > 0;) {
    for (std::size_t i = 0; i < points.size(); ++i) {
      const std::array<double, kChildren>& children = levels_[level][found[i]].sums;
      double point = points[i];
      std::size_t chosen = 0;
      std::size_t child = 0;
      for (; child < kChildren; ++child) {
        if (children[child] > 0) chosen = child;
        if (point < children[child]) break;
        point -= children[child];
      }
      // Past the last one, by rounding: the end of the last one with a weight.
      points[i] = child < kChildren ? point : children[chosen];
      found[i] = static_cast<std::uint32_t>(found[i] * kChildren + chosen);
      if (level > 0) __builtin_prefetch(&levels_[level - 1][found[i]]);
    }
  }
}

}  // namespace moolink::replay
