#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moolink::replay {

// Weights of leaves, and the sums of all their groups. Each sum is recomputed from its children,
// never changed by a difference, so after any number of updates it equals that of a new tree with
// the same leaves. A node has eight children, which share a cache line.
class SumTree {
 public:
  SumTree() { resize(1); }

  // Room for this many leaves or more; new ones have weight 0. It never shrinks, and grows to at
  // least twice its size.
  void resize(std::size_t leaves);

  double weight(std::uint32_t leaf) const {
    return levels_.front()[leaf / kChildren].sums[leaf % kChildren];
  }
  double total() const { return levels_.back().front().sums[0]; }

  void set(std::uint32_t leaf, double weight) { set({&leaf, 1}, {&weight, 1}); }
  // If a leaf is named twice, its last weight counts.
  void set(std::span<const std::uint32_t> leaves, std::span<const double> weights);

  // The leaf at each point of [0, total()): never one of weight 0. The total must be positive.
  void find(std::span<double> points, std::span<std::uint32_t> found) const;

 private:
  static constexpr std::size_t kChildren = 8;

  struct alignas(64) Node {
    std::array<double, kChildren> sums{};

    double total() const;
  };
  using Level = std::vector<Node>;

  std::vector<Level> levels_;  // leaves first; the last one's first sum is the total
  std::vector<std::uint32_t> changed_;
};

}  // namespace moolink::replay
