#include "replay/selector.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "check.h"

using moolink::Random;
using moolink::replay::Choice;
using moolink::replay::make_selector;
using moolink::replay::Selector;
using moolink::replay::SelectorKind;
using moolink::replay::Slot;

namespace {

std::unique_ptr<Selector> filled(SelectorKind kind, const std::vector<double>& priorities,
                                 double exponent = 1) {
  auto selector = make_selector({kind, exponent});
  for (std::size_t i = 0; i < priorities.size(); ++i) {
    selector->insert(static_cast<Slot>(i), priorities[i]);
  }
  return selector;
}

Slot first(Selector& selector) {
  Random random(1);
  Choice choice;
  selector.choose(random, {&choice, 1});
  return choice.slot;
}

void update(Selector& selector, Slot slot, double priority) {
  selector.update({&slot, 1}, {&priority, 1});
}

// How often each slot is chosen, and the probability that was told.
std::map<Slot, std::pair<double, double>> frequencies(Selector& selector) {
  constexpr std::size_t kTimes = 200'000;
  Random random(7);
  std::vector<Choice> choices(kTimes);
  selector.choose(random, choices);
  std::map<Slot, std::pair<double, double>> found;
  for (const Choice& choice : choices) {
    found[choice.slot].first += 1.0 / kTimes;
    found[choice.slot].second = choice.probability;
  }
  return found;
}

bool near(double a, double b) { return std::abs(a - b) < 0.005; }

}  // namespace

TEST("uniform: all that are there are equally likely") {
  const auto selector = filled(SelectorKind::uniform, {5, 1, 1, 9, 1});
  selector->remove(1);
  const auto found = frequencies(*selector);
  CHECK_EQ(found.size(), 4U);
  for (const auto& [slot, seen] : found) {
    CHECK(slot != 1);
    CHECK(near(seen.first, 0.25));
    CHECK_EQ(seen.second, 0.25);
  }
}

TEST("prioritized: in proportion to the priority's power") {
  const auto selector = filled(SelectorKind::prioritized, {4, 0, 1, 9, 7}, 0.5);
  selector->remove(4);
  update(*selector, 2, 25);
  const auto found = frequencies(*selector);
  CHECK_EQ(found.size(), 3U);
  CHECK(near(found.at(0).first, 0.2));
  CHECK(near(found.at(2).first, 0.5));
  CHECK(near(found.at(3).first, 0.3));
  CHECK_EQ(found.at(2).second, 0.5);
}

TEST("prioritized: where all priorities are 0 all are equally likely, whatever the exponent") {
  for (const double exponent : {0.0, 1.0}) {
    const auto selector = filled(SelectorKind::prioritized, {0, 0}, exponent);
    const auto found = frequencies(*selector);
    CHECK_EQ(found.size(), 2U);
    CHECK(near(found.at(0).first, 0.5));
    CHECK_EQ(found.at(1).second, 0.5);
  }
}

TEST("fifo and lifo: by age, whatever was removed between") {
  const auto oldest = filled(SelectorKind::fifo, {1, 1, 1, 1});
  const auto newest = filled(SelectorKind::lifo, {1, 1, 1, 1});
  CHECK_EQ(first(*oldest), 0U);
  CHECK_EQ(first(*newest), 3U);
  for (const Slot slot : {0, 2, 3}) {
    oldest->remove(slot);
    newest->remove(slot);
  }
  CHECK_EQ(first(*oldest), 1U);
  CHECK_EQ(first(*newest), 1U);
  oldest->insert(0, 1);
  newest->insert(0, 1);
  CHECK_EQ(first(*oldest), 1U);
  CHECK_EQ(first(*newest), 0U);
}

TEST("heaps: by priority, of equal ones the one that was set first") {
  const auto least = filled(SelectorKind::min_heap, {3, 1, 2, 1, 5});
  const auto greatest = filled(SelectorKind::max_heap, {3, 5, 2, 5, 1});
  CHECK_EQ(first(*least), 1U);
  CHECK_EQ(first(*greatest), 1U);
  update(*least, 1, 1);
  CHECK_EQ(first(*least), 3U);
  greatest->remove(1);
  CHECK_EQ(first(*greatest), 3U);
  update(*greatest, 3, 0);
  CHECK_EQ(first(*greatest), 0U);
}

TEST("a heap stays one under any changes") {
  Random random(3);
  const auto heap = make_selector({SelectorKind::min_heap});
  std::map<Slot, double> model;
  for (int i = 0; i < 5000; ++i) {
    const auto slot = static_cast<Slot>(random.below(60));
    const auto priority = static_cast<double>(random.next() >> 20);
    if (!model.contains(slot)) {
      heap->insert(slot, priority);
      model[slot] = priority;
    } else if (random.chance(1, 2)) {
      update(*heap, slot, priority);
      model[slot] = priority;
    } else {
      heap->remove(slot);
      model.erase(slot);
    }
    if (model.empty()) continue;
    double least = model.begin()->second;
    for (const auto& [other, of_other] : model) least = std::min(least, of_other);
    CHECK_EQ(model.at(first(*heap)), least);
  }
}
