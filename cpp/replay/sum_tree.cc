#include "replay/sum_tree.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/round_up.h"

namespace moolink::replay {

SumTree::Level SumTree::make_level(std::size_t size) {
  Level level;
  level.size = round_up(std::max<std::size_t>(size, 1), kChildren);
  const std::size_t bytes = level.size * sizeof(double);
  level.sums.reset(static_cast<double*>(::operator new(bytes, std::align_val_t(kCacheLine))));
  std::memset(level.sums.get(), 0, bytes);
  return level;
}

double SumTree::sum_of(const double* c) {
  return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]));
}

void SumTree::resize(std::size_t leaves) {
  if (!levels_.empty() && leaves <= levels_.front().size) return;
  std::vector<Level> levels;
  levels.push_back(make_level(leaves));
  if (!levels_.empty()) {
    const Level& old = levels_.front();
    std::copy_n(old.sums.get(), old.size, levels.front().sums.get());
  }
  while (levels.size() == 1 || levels.back().size > kChildren) {
    const Level& below = levels.back();
    Level level = make_level(below.size / kChildren);
    for (std::size_t i = 0; i < below.size / kChildren; ++i) {
      level.sums[i] = sum_of(below.sums.get() + i * kChildren);
    }
    levels.push_back(std::move(level));
  }
  // The top level is one node of up to eight children, and above it the total.
  Level top = make_level(1);
  top.sums[0] = sum_of(levels.back().sums.get());
  levels.push_back(std::move(top));
  levels_ = std::move(levels);
}

void SumTree::set(std::span<const std::uint32_t> leaves, std::span<const double> weights) {
  double* sums = levels_.front().sums.get();
  for (std::size_t i = 0; i < leaves.size(); ++i) sums[leaves[i]] = weights[i];
  changed_.assign(leaves.begin(), leaves.end());
  for (std::size_t level = 1; level < levels_.size(); ++level) {
    const double* below = levels_[level - 1].sums.get();
    double* above = levels_[level].sums.get();
    std::size_t kept = 0;
    for (const std::uint32_t child : changed_) {
      const auto parent = static_cast<std::uint32_t>(child / kChildren);
      if (kept > 0 && changed_[kept - 1] == parent) continue;  // neighbours are changed together
      above[parent] = sum_of(below + parent * kChildren);
      changed_[kept++] = parent;
    }
    changed_.resize(kept);
  }
}

// All points go down by one level at a time, so that their cache misses overlap.
void SumTree::find(std::span<double> points, std::span<std::uint32_t> found) const {
  std::fill(found.begin(), found.end(), 0);
  for (std::size_t level = levels_.size() - 1; level-- > 0;) {
    const double* sums = levels_[level].sums.get();
    for (std::size_t i = 0; i < points.size(); ++i) {
      const double* children = sums + std::size_t{found[i]} * kChildren;
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
      if (level > 0) {
        __builtin_prefetch(levels_[level - 1].sums.get() + std::size_t{found[i]} * kChildren);
      }
    }
  }
}

}  // namespace moolink::replay
