#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "common/simulation.h"
#include "replay/model.h"
#include "replay/rows.h"
#include "replay/table.h"

namespace moolink::sim {

// Writers and learners of one table, in any order, with any options: they insert, sample, stop
// waiting, change priorities and remove; the table's server begins anew from its checkpoint.
// Checked: what the model says, for whom nothing is left to chance; and for all tables that nobody
// waits who could go on, that each item is sampled as often as it may be and each key means one
// item for ever, and that a row is referred to by exactly those who hold it.
class ReplayWorld {
 public:
  ReplayWorld(std::uint64_t seed, bool print) : random_(seed), trace_(print), seed_(seed) {}

  void run();
  std::uint64_t hash() const { return trace_.hash(); }

 private:
  static constexpr std::size_t kWidth = 2;  // rows of an item

  void draw();
  replay::SelectorOptions draw_selector();
  bool decided() const;  // nothing is left to chance
  double draw_priority();

  void act();
  void insert();
  void sample();
  void withdraw();
  void update();
  void remove();
  void restart();
  void age(replay::TableState& state);
  std::vector<replay::Key> some_keys();

  void advance_model();
  void take_ended();
  void end_insert(replay::Request request);
  void end_sample(replay::Request request);
  void check_picks(replay::Request request, const replay::Picks& picks);
  void check();
  void check_nobody_waits_in_vain();
  void check_references();

  Random random_;
  Trace trace_;
  std::uint64_t seed_;
  replay::TableOptions options_;
  replay::Rows rows_;
  std::unique_ptr<replay::Table> table_;
  std::unique_ptr<TableModel> model_;
  std::map<replay::Request, std::vector<replay::Row>> inserting_;  // rows of its items
  std::map<replay::Request, std::size_t> sampling_;                // how many
  std::map<replay::Key, std::uint64_t> known_;                     // first row of each key's item
  std::map<replay::Key, std::uint32_t> times_;
  std::vector<std::vector<replay::Row>> held_;  // of batches that are being copied
};

}  // namespace moolink::sim
