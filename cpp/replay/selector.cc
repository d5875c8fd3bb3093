#include "replay/selector.h"

#include <cmath>
#include <cstddef>
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
  void update(std::span<const Slot>, std::span<const double>) override {}
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
    if (slot >= capacity_) {
      capacity_ = 2 * (slot + std::size_t{1});
      tree_.resize(capacity_);
    }
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
  std::size_t capacity_ = 1;
  SlotSet slots_;
  std::vector<double> weights_, points_;
  std::vector<Slot> found_;
};

// Slots in order of arrival.
class Line final : public Selector {
 public:
  explicit Line(bool oldest) : oldest_(oldest) {}

  void insert(Slot slot, double) override {
    if (slot >= links_.size()) links_.resize(slot + std::size_t{1});
    links_[slot] = {newest_in_line_, kNone};
    (newest_in_line_ == kNone ? oldest_in_line_ : links_[newest_in_line_].newer) = slot;
    newest_in_line_ = slot;
  }

  void remove(Slot slot) override {
    const Link link = links_[slot];
    (link.older == kNone ? oldest_in_line_ : links_[link.older].newer) = link.newer;
    (link.newer == kNone ? newest_in_line_ : links_[link.newer].older) = link.older;
  }

  void update(std::span<const Slot>, std::span<const double>) override {}

  void choose(Random&, std::span<Choice> choices) override {
    for (Choice& choice : choices) choice = {oldest_ ? oldest_in_line_ : newest_in_line_, 1};
  }

 private:
  static constexpr Slot kNone = ~Slot{0};
  struct Link {
    Slot older = kNone;
    Slot newer = kNone;
  };

  bool oldest_;
  Slot oldest_in_line_ = kNone;
  Slot newest_in_line_ = kNone;
  std::vector<Link> links_;  // by slot
};

// A binary heap; of equal priorities the one inserted or updated first comes first.
class Heap final : public Selector {
 public:
  explicit Heap(bool least) : sign_(least ? 1 : -1) {}

  void insert(Slot slot, double priority) override {
    if (slot >= places_.size()) places_.resize(slot + std::size_t{1});
    places_[slot] = nodes_.size();
    nodes_.push_back({sign_ * priority, ++changes_, slot});
    rise(places_[slot]);
  }

  void remove(Slot slot) override {
    const std::size_t place = places_[slot];
    const Node last = nodes_.back();
    nodes_.pop_back();
    if (place == nodes_.size()) return;
    nodes_[place] = last;
    places_[last.slot] = place;
    settle(place);
  }

  void update(std::span<const Slot> slots, std::span<const double> priorities) override {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Node& node = nodes_[places_[slots[i]]];
      node.order = sign_ * priorities[i];
      node.change = ++changes_;
      settle(places_[slots[i]]);
    }
  }

  void choose(Random&, std::span<Choice> choices) override {
    for (Choice& choice : choices) choice = {nodes_.front().slot, 1};
  }

 private:
  struct Node {
    double order = 0;
    std::uint64_t change = 0;
    Slot slot = 0;

    bool before(const Node& other) const {
      return order != other.order ? order < other.order : change < other.change;
    }
  };

  void settle(std::size_t place) {
    const Slot slot = nodes_[place].slot;
    rise(place);
    sink(places_[slot]);
  }

  void rise(std::size_t place) {
    while (place > 0 && nodes_[place].before(nodes_[(place - 1) / 2])) {
      swap_nodes(place, (place - 1) / 2);
      place = (place - 1) / 2;
    }
  }

  void sink(std::size_t place) {
    while (true) {
      std::size_t first = place;
      for (std::size_t child = 2 * place + 1; child <= 2 * place + 2; ++child) {
        if (child < nodes_.size() && nodes_[child].before(nodes_[first])) first = child;
      }
      if (first == place) return;
      swap_nodes(place, first);
      place = first;
    }
  }

  void swap_nodes(std::size_t a, std::size_t b) {
    std::swap(nodes_[a], nodes_[b]);
    places_[nodes_[a].slot] = a;
    places_[nodes_[b].slot] = b;
  }

  double sign_;
  std::uint64_t changes_ = 0;
  std::vector<Node> nodes_;
  std::vector<std::size_t> places_;  // by slot
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
      return std::make_unique<Line>(true);
    case SelectorKind::lifo:
      return std::make_unique<Line>(false);
    case SelectorKind::min_heap:
      return std::make_unique<Heap>(true);
    case SelectorKind::max_heap:
      return std::make_unique<Heap>(false);
  }
  return nullptr;
}

}  // namespace moolink::replay
