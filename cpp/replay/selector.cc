#include "replay/selector.h"

#include <cmath>
#include <cstddef>
#include <set>
#include <utility>
#include <vector>

#include "replay/sum_tree.h"

namespace moolink::replay {
namespace {

double fraction(Random& random) { return static_cast<double>(random.next() >> 11) * 0x1p-53; }

// Slots in any order, with immediate removal.
class SlotSet {
 public:
  void insert(Slot slot) {
    if (slot >= places_.size()) places_.resize(slot + std::size_t{1});
    places_[slot] = slots_.size();
    slots_.push_back(slot);
  }

  void remove(Slot slot) {
    const std::size_t place = places_[slot];
    slots_[place] = slots_.back();
    places_[slots_[place]] = place;
    slots_.pop_back();
  }

  Choice any(Random& random) const {
    return {slots_[random.below(slots_.size())], 1 / static_cast<double>(slots_.size())};
  }

 private:
  std::vector<Slot> slots_;
  std::vector<std::size_t> places_;  // by slot
};

class Uniform final : public Selector {
 public:
  void insert(Slot slot, double) override { slots_.insert(slot); }
  void remove(Slot slot) override { slots_.remove(slot); }
  void choose(Random& random, std::span<Choice> choices) override {
    for (Choice& choice : choices) choice = slots_.any(random);
  }

 private:
  SlotSet slots_;
};

// If all priorities are 0, all items are equally likely.
class Prioritized final : public Selector {
 public:
  explicit Prioritized(double exponent) : exponent_(exponent) {}

  void insert(Slot slot, double priority) override {
    tree_.resize(slot + std::size_t{1});
    tree_.set(slot, weight_of(priority, exponent_));
    slots_.insert(slot);
  }

  void remove(Slot slot) override {
    tree_.set(slot, 0);
    slots_.remove(slot);
  }

  void update(std::span<const Slot> slots, std::span<const double> priorities) override {
    weights_.clear();
    for (const double priority : priorities) weights_.push_back(weight_of(priority, exponent_));
    tree_.set(slots, weights_);
  }

  void choose(Random& random, std::span<Choice> choices) override {
    const double total = tree_.total();
    if (total <= 0) {
      for (Choice& choice : choices) choice = slots_.any(random);
      return;
    }
    points_.clear();
    for (std::size_t i = 0; i < choices.size(); ++i) points_.push_back(fraction(random) * total);
    found_.resize(choices.size());
    tree_.find(points_, found_);
    for (std::size_t i = 0; i < choices.size(); ++i) {
      choices[i] = {found_[i], tree_.weight(found_[i]) / total};
    }
  }

 private:
  double exponent_;
  SumTree tree_;
  SlotSet slots_;
  std::vector<double> weights_, points_;
  std::vector<Slot> found_;
};

// Slots by priority, and those of equal priority by the time of their insertion or last update. The
// weights of the two are 1, -1 (the greatest first) or, for the priority, 0 (it does not count).
class Ordered final : public Selector {
 public:
  Ordered(int by_priority, std::int64_t by_time) : by_priority_(by_priority), by_time_(by_time) {}

  void insert(Slot slot, double priority) override {
    if (slot >= places_.size()) places_.resize(slot + std::size_t{1});
    const auto likely = by_time_ > 0 ? order_.end() : order_.begin();
    places_[slot] = order_.insert(likely, {by_priority_ * priority, by_time_ * ++changes_, slot});
  }
  void remove(Slot slot) override { order_.erase(places_[slot]); }
  void update(std::span<const Slot> slots, std::span<const double> priorities) override {
    if (by_priority_ == 0) return;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      auto node = order_.extract(places_[slots[i]]);  // so that this allocates nothing
      node.value() = {by_priority_ * priorities[i], by_time_ * ++changes_, slots[i]};
      places_[slots[i]] = order_.insert(std::move(node)).position;
    }
  }
  void choose(Random&, std::span<Choice> choices) override {
    for (Choice& choice : choices) choice = {order_.begin()->slot, 1};
  }

 private:
  struct Place {
    double priority = 0;
    std::int64_t time = 0;
    Slot slot = 0;

    auto operator<=>(const Place&) const = default;
  };

  const int by_priority_;
  const std::int64_t by_time_;
  std::int64_t changes_ = 0;
  std::set<Place> order_;
  std::vector<std::set<Place>::iterator> places_;  // by slot
};

}  // namespace

double weight_of(double priority, double exponent) {
  return priority == 0 ? 0 : std::pow(priority, exponent);
}

std::unique_ptr<Selector> make_selector(const SelectorOptions& options) {
  switch (options.kind) {
    case SelectorKind::uniform:
      return std::make_unique<Uniform>();
    case SelectorKind::prioritized:
      return std::make_unique<Prioritized>(options.exponent);
    case SelectorKind::fifo:
      return std::make_unique<Ordered>(0, 1);
    case SelectorKind::lifo:
      return std::make_unique<Ordered>(0, -1);
    case SelectorKind::min_heap:
      return std::make_unique<Ordered>(1, 1);
    case SelectorKind::max_heap:
      return std::make_unique<Ordered>(-1, 1);
  }
  return nullptr;
}

}  // namespace moolink::replay
