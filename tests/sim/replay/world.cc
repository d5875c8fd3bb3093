#include "replay/world.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/program.h"

namespace moolink::sim {

using replay::SelectorKind;

void ReplayWorld::run() {
  draw();
  table_ = std::make_unique<replay::Table>(options_, seed_);
  table_->set_rows(rows_);
  model_ = std::make_unique<TableModel>(options_);
  for (int i = 0; i < 120; ++i) {
    act();
    advance_model();
    take_ended();
    check();
  }
}

void ReplayWorld::draw() {
  options_.sampler = draw_selector();
  if (random_.chance(3, 4)) options_.remover = draw_selector();
  options_.max_size = 1 + random_.below(12);
  options_.max_times_sampled = static_cast<std::uint32_t>(random_.below(4));
  replay::LimiterOptions& limits = options_.limiter;
  limits.min_size = static_cast<std::int64_t>(1 + random_.below(options_.max_size));
  if (random_.chance(1, 4)) return;
  limits.samples_per_insert = std::vector{0.25, 0.5, 1.0, 1.5, 4.0}[random_.below(5)];
  const double buffer =
      std::max(1.0, limits.samples_per_insert) * (1 + static_cast<double>(random_.below(9)) / 4);
  const double offset = limits.samples_per_insert * static_cast<double>(limits.min_size);
  limits.min_diff = offset - buffer;
  limits.max_diff = offset + buffer;
}

replay::SelectorOptions ReplayWorld::draw_selector() {
  const auto kind = static_cast<SelectorKind>(random_.below(6));
  return {kind, kind == SelectorKind::prioritized ? 0.5 : 1.0};
}

bool ReplayWorld::decided() const {
  const auto by_chance = [](const replay::SelectorOptions& selector) {
    return selector.kind == SelectorKind::uniform || selector.kind == SelectorKind::prioritized;
  };
  return !by_chance(options_.sampler) && !(options_.remover && by_chance(*options_.remover));
}

double ReplayWorld::draw_priority() { return static_cast<double>(random_.below(4)); }

void ReplayWorld::act() {
  const std::uint64_t dice = random_.below(100);
  if (dice < 35) {
    insert();
  } else if (dice < 65) {
    sample();
  } else if (dice < 75) {
    withdraw();
  } else if (dice < 87) {
    update();
  } else if (dice < 95) {
    remove();
  } else if (dice < 97) {
    table_->reset();
    model_->reset();
  } else {
    restart();
  }
}

void ReplayWorld::insert() {
  const std::size_t count = 1 + random_.below(4);
  replay::NewItems items;
  items.width = kWidth;
  items.rows.resize(count * kWidth);
  rows_.take(items.rows);
  std::deque<TableModel::Item> modelled;
  for (std::size_t i = 0; i < count; ++i) {
    items.priorities.push_back(draw_priority());
    modelled.push_back({items.rows[i * kWidth], items.priorities.back(), 0, 0, 0});
  }
  std::vector<replay::Row> rows = items.rows;
  const replay::Request request = table_->insert(std::move(items));
  inserting_.emplace(request, std::move(rows));
  model_->insert(request, std::move(modelled));
}

void ReplayWorld::sample() {
  const std::size_t count = 1 + random_.below(6);
  const replay::Request request = table_->sample(count);
  sampling_.emplace(request, count);
  model_->sample(request, count);
}

void ReplayWorld::withdraw() {
  const bool of_inserts = random_.chance(1, 2);
  const std::size_t waiting = of_inserts ? inserting_.size() : sampling_.size();
  if (waiting == 0) return;
  const auto which = static_cast<std::ptrdiff_t>(random_.below(waiting));
  if (of_inserts) {
    end_insert(std::next(inserting_.begin(), which)->first);
  } else {
    end_sample(std::next(sampling_.begin(), which)->first);
  }
}

std::vector<replay::Key> ReplayWorld::some_keys() {
  std::vector<replay::Key> keys;
  for (std::uint64_t count = random_.below(4); count > 0 && !known_.empty(); --count) {
    // Mostly of the latest, which are still there.
    const std::uint64_t range =
        random_.chance(3, 4) ? std::min<std::size_t>(8, known_.size()) : known_.size();
    keys.push_back(
        std::prev(known_.end(), static_cast<std::ptrdiff_t>(1 + random_.below(range)))->first);
  }
  return keys;
}

void ReplayWorld::update() {
  const std::vector<replay::Key> keys = some_keys();
  std::vector<double> priorities;
  for (std::size_t i = 0; i < keys.size(); ++i) priorities.push_back(draw_priority());
  std::map<replay::Key, double> last;
  std::set<replay::Key> there;
  for (const replay::ItemState& item : table_->state().items) there.insert(item.key);
  std::size_t expected = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (there.contains(keys[i])) {
      model_->update(known_.at(keys[i]), priorities[i]);
      last[keys[i]] = priorities[i];
      ++expected;
    } else {
      ++coverage["priority of an item that is gone"];
    }
  }
  require(table_->update(keys, priorities) == expected, "an update counts what is not there");
  for (const replay::ItemState& item : table_->state().items) {
    const auto set = last.find(item.key);
    require(set == last.end() || item.priority == set->second, "a priority was not set");
  }
}

void ReplayWorld::remove() {
  std::set<replay::Key> there;
  for (const replay::ItemState& item : table_->state().items) there.insert(item.key);
  std::set<replay::Key> removed;
  const std::vector<replay::Key> keys = some_keys();
  for (const replay::Key key : keys) {
    if (there.contains(key)) removed.insert(key);
  }
  for (const replay::Key key : removed) model_->remove(known_.at(key));
  require(table_->remove(keys) == removed.size(), "a removal counts what is not there");
}

void ReplayWorld::restart() {
  while (!inserting_.empty()) end_insert(inserting_.begin()->first);
  while (!sampling_.empty()) end_sample(sampling_.begin()->first);
  replay::TableState state = table_->state();
  if (random_.below(2) == 0) age(state);
  table_ = std::make_unique<replay::Table>(options_, seed_ + 1);
  table_->set_rows(rows_);
  table_->restore(std::move(state));
  model_->restart();
  ++coverage["restart"];
}

// Sets the free slots as if they had held almost as many items as they may.
void ReplayWorld::age(replay::TableState& state) {
  std::set<std::size_t> in_use;
  for (const replay::ItemState& item : state.items)
    in_use.insert(static_cast<std::uint32_t>(item.key));
  for (std::size_t slot = 0; slot < state.generations.size(); ++slot) {
    if (in_use.contains(slot)) continue;
    const auto left = static_cast<std::uint32_t>(random_.below(3));
    state.generations[slot] = std::max(state.generations[slot], replay::kLastGeneration - left);
    ++coverage["slot with few keys left"];
  }
}

void ReplayWorld::advance_model() {
  if (decided()) model_->advance();
}

void ReplayWorld::take_ended() {
  for (const replay::Request request : table_->take_ended()) {
    if (inserting_.contains(request)) {
      end_insert(request);
    } else if (sampling_.contains(request)) {
      end_sample(request);
    }
  }
}

void ReplayWorld::end_insert(replay::Request request) {
  advance_model();
  const auto node = inserting_.extract(request);
  const std::vector<replay::Key> keys = table_->take_inserted(request);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    require(keys[i] >= 0, "a key is negative");
    require(known_.emplace(keys[i], node.mapped()[i * kWidth]).second, "a key was used twice");
    trace_.add(static_cast<std::uint64_t>(keys[i]));
  }
  if (keys.size() * kWidth < node.mapped().size()) {
    ++coverage[keys.empty() ? "withdrawn insert" : "withdrawn insert of a part"];
  }
  if (decided()) {
    require(model_->withdraw_insert(request).done == keys.size(),
            "another number of items was inserted than the limiter allows");
  }
}

void ReplayWorld::end_sample(replay::Request request) {
  advance_model();
  const std::size_t count = sampling_.extract(request).mapped();
  replay::Picks picks = table_->take_sampled(request);
  if (picks.keys.size() < count) {
    ++coverage[picks.keys.empty() ? "withdrawn sample" : "withdrawn sample of a part"];
  }
  check_picks(request, picks);
  held_.push_back(std::move(picks.rows));
  if (held_.size() > 3) {
    rows_.release(held_.front());
    held_.erase(held_.begin());
  }
}

void ReplayWorld::check_picks(replay::Request request, const replay::Picks& picks) {
  std::vector<TableModel::Pick> seen;
  for (std::size_t i = 0; i < picks.keys.size(); ++i) {
    seen.push_back({picks.rows[i * kWidth], picks.times_sampled[i]});
    trace_.add(static_cast<std::uint64_t>(picks.keys[i]));
    require(picks.probabilities[i] > 0 && picks.probabilities[i] <= 1, "no probability");
    // Items that an unfinished request has inserted have keys that nobody was told yet.
    const auto known = known_.find(picks.keys[i]);
    require(known == known_.end() || known->second == picks.rows[i * kWidth],
            "a key means another item than before");
    const std::uint32_t most = options_.max_times_sampled;
    require(most == 0 || picks.times_sampled[i] <= most, "an item was sampled once too often");
    if (most != 0 && picks.times_sampled[i] == most) ++coverage["removed after its last sample"];
  }
  if (decided()) {
    require(model_->withdraw_sample(request).picks == seen, "other items were sampled");
  }
}

void ReplayWorld::check() {
  const replay::Limiter::Counts& counts = table_->counts();
  require(static_cast<std::size_t>(counts.size()) == table_->size(), "the counts miss a removal");
  require(table_->size() <= options_.max_size, "more items than the table may have");
  if (counts.samples > 0) {
    const double error = static_cast<double>(counts.inserts) * options_.limiter.samples_per_insert -
                         static_cast<double>(counts.samples);
    require(error >= options_.limiter.min_diff, "more was sampled than inserts allow");
  }
  if (table_->size() == options_.max_size) ++coverage["full"];
  if (counts.deletes > 0 && counts.size() < options_.limiter.min_size) {
    ++coverage["below min_size again"];
  }
  check_nobody_waits_in_vain();
  check_references();
  if (!decided()) return;
  require(counts == model_->counts(), "the counts are not those of the model");
  for (const auto& [request, rows] : inserting_) {
    require(!model_->ended(request), "an insert waits that may go on");
  }
  for (const auto& [request, count] : sampling_) {
    require(!model_->ended(request), "a sample waits that may go on");
  }
  require(table_->waiting_inserts() == inserting_.size(), "another number of inserts waits");
  require(table_->waiting_samples() == sampling_.size(), "another number of samples waits");
}

void ReplayWorld::check_nobody_waits_in_vain() {
  const replay::LimiterOptions& limits = options_.limiter;
  const replay::Limiter::Counts& counts = table_->counts();
  const double error = static_cast<double>(counts.inserts) * limits.samples_per_insert -
                       static_cast<double>(counts.samples);
  if (!inserting_.empty()) {
    ++coverage["an insert waits"];
    const bool free = counts.size() + 1 <= limits.min_size;
    const bool allowed = free || error + limits.samples_per_insert <= limits.max_diff;
    const bool room = options_.remover || table_->size() < options_.max_size;
    require(!allowed || !room, "an insert waits in vain");
  }
  if (!sampling_.empty()) {
    ++coverage["a sample waits"];
    const bool enough = counts.size() >= limits.min_size;
    require(!enough || error - 1 < limits.min_diff, "a sample waits in vain");
  }
}

void ReplayWorld::check_references() {
  std::map<replay::Row, std::uint32_t> expected;
  for (const replay::ItemState& item : table_->state().items) {
    for (const replay::Row row : item.rows) ++expected[row];
  }
  for (const auto& rows : held_) {
    for (const replay::Row row : rows) ++expected[row];
  }
  std::size_t unknown = 0;
  for (replay::Row row = 0; row < rows_.rows(); ++row) {
    const std::uint32_t references = rows_.references(row);
    if (references == expected[row]) continue;
    // Of an item that waits to be inserted, or was picked by one who still waits.
    require(references > expected[row], "a row is free that somebody refers to");
    ++unknown;
  }
  require(unknown == 0 || !inserting_.empty() || !sampling_.empty(),
          "a row is held that nobody refers to");
}

}  // namespace moolink::sim
