#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/random.h"

namespace moolink::replay {

// A table's place for an item; reused after the item was removed.
using Slot = std::uint32_t;

enum class SelectorKind : std::uint8_t { uniform, prioritized, fifo, lifo, min_heap, max_heap };

struct SelectorOptions {
  SelectorKind kind = SelectorKind::uniform;
  double exponent = 1;  // prioritized: an item is chosen in proportion to priority^exponent

  bool operator==(const SelectorOptions&) const = default;
};

struct Choice {
  Slot slot = 0;
  double probability = 0;
};

// Chooses among the items of a table: the one to sample, or the one to remove.
class Selector {
 public:
  virtual ~Selector() = default;

  virtual void insert(Slot slot, double priority) = 0;
  virtual void remove(Slot slot) = 0;
  // A slot may occur twice: its last priority counts, if the selector uses priorities.
  virtual void update(std::span<const Slot> /*slots*/, std::span<const double> /*priorities*/) {}
  // Independent choices from the present items; there must be at least one.
  virtual void choose(Random& random, std::span<Choice> choices) = 0;
};

std::unique_ptr<Selector> make_selector(const SelectorOptions& options);

// The largest weight, priority^exponent, that a prioritized selector can hold: sums stay finite.
inline constexpr double kLargestWeight = 1e290;
double weight_of(double priority, double exponent);

}  // namespace moolink::replay
