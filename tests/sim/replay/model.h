#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "replay/table.h"

namespace moolink::sim {

// A table as the rules say it, item by item and by searching. It tells what the machine must do
// where no choice is left to chance: with selectors other than uniform and prioritized.
class TableModel {
 public:
  explicit TableModel(const replay::TableOptions& options) : options_(options) {}

  struct Item {
    std::uint64_t name = 0;  // its first row
    double priority = 0;
    std::uint32_t times = 0;
    std::uint64_t order = 0;   // of insertion
    std::uint64_t change = 0;  // of insertion or the last priority
  };
  struct Pick {
    std::uint64_t name = 0;
    std::uint32_t times = 0;

    bool operator==(const Pick&) const = default;
  };
  struct Insert {
    std::deque<Item> left;
    std::size_t done = 0;
  };
  struct Sample {
    std::size_t count = 0;
    std::vector<Pick> picks;
  };

  void insert(std::uint64_t request, std::deque<Item> items);
  void sample(std::uint64_t request, std::size_t count);
  Insert withdraw_insert(std::uint64_t request);
  Sample withdraw_sample(std::uint64_t request);
  void update(std::uint64_t name, double priority);  // of an item that is there
  void remove(std::uint64_t name);
  void reset();
  void restart();  // what a checkpoint keeps
  // Lets all go on that may; after any of the above.
  void advance();

  bool ended(std::uint64_t request) const;
  std::size_t size() const { return items_.size(); }
  const std::vector<Item>& items() const { return items_; }
  const replay::Limiter::Counts& counts() const { return counts_; }

 private:
  bool insert_one();
  bool sample_one();
  std::size_t choose(const replay::SelectorOptions& selector) const;
  void erase(std::size_t index);

  replay::TableOptions options_;
  replay::Limiter::Counts counts_;
  std::vector<Item> items_;
  std::uint64_t orders_ = 0;
  std::map<std::uint64_t, Insert> inserts_;
  std::map<std::uint64_t, Sample> samples_;
  std::deque<std::uint64_t> insert_line_, sample_line_;
};

}  // namespace moolink::sim
