#include "replay/sum_tree.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "check.h"

using moolink::Random;
using moolink::replay::SumTree;

namespace {

std::uint32_t leaf_at(const SumTree& tree, double point) {
  std::uint32_t found = 0;
  tree.find({&point, 1}, {&found, 1});
  return found;
}

}  // namespace

TEST("a sum tree finds the leaf under each point") {
  SumTree tree;
  tree.resize(1000);
  tree.set(3, 1);
  tree.set(77, 2);
  tree.set(999, 4);
  CHECK_EQ(tree.total(), 7.0);
  CHECK_EQ(leaf_at(tree, 0), 3U);
  CHECK_EQ(leaf_at(tree, 0.999), 3U);
  CHECK_EQ(leaf_at(tree, 1), 77U);
  CHECK_EQ(leaf_at(tree, 2.999), 77U);
  CHECK_EQ(leaf_at(tree, 3), 999U);
  CHECK_EQ(leaf_at(tree, 6.999), 999U);
}

TEST("a point at the very end, by rounding, falls on a leaf that weighs something") {
  SumTree tree;
  tree.resize(600);
  tree.set(5, 0.1);
  tree.set(300, 0.2);
  CHECK_EQ(leaf_at(tree, tree.total()), 300U);
  tree.set(300, 0);
  CHECK_EQ(leaf_at(tree, tree.total()), 5U);
}

TEST("after any updates a sum tree is the one that its leaves make anew") {
  Random random(1);
  SumTree tree;
  std::size_t leaves = 10;
  tree.resize(leaves);
  for (int i = 0; i < 2000; ++i) {
    if (i % 400 == 399) tree.resize(leaves *= 7);
    std::vector<std::uint32_t> changed;
    std::vector<double> weights;
    for (std::uint64_t count = random.below(40); count > 0; --count) {
      changed.push_back(static_cast<std::uint32_t>(random.below(leaves)));
      // Of very different sizes, so that sums by differences would not be exact.
      weights.push_back(static_cast<double>(random.next() >> random.below(60)));
    }
    tree.set(changed, weights);
  }
  SumTree anew;
  anew.resize(leaves);
  for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) anew.set(leaf, tree.weight(leaf));
  CHECK_EQ(tree.total(), anew.total());
  for (int i = 0; i < 2000; ++i) {
    const double point = static_cast<double>(random.next() >> 11) * 0x1p-53 * tree.total();
    CHECK_EQ(leaf_at(tree, point), leaf_at(anew, point));
  }
}

TEST("of a leaf that is named twice the last weight counts") {
  SumTree tree;
  tree.resize(100);
  const std::vector<std::uint32_t> leaves = {9, 50, 9};
  const std::vector<double> weights = {1, 2, 4};
  tree.set(leaves, weights);
  CHECK_EQ(tree.weight(9), 4.0);
  CHECK_EQ(tree.total(), 6.0);
}
