#include "replay/table.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/error.h"

namespace moolink::replay {

Table::Table(const TableOptions& options, std::uint64_t seed)
    : options_(options),
      random_(seed),
      limiter_(options.limiter),
      sampler_(make_selector(options.sampler)),
      remover_(options.remover ? make_selector(*options.remover) : nullptr) {}

Request Table::insert(NewItems items) {
  const Request request = ++last_request_;
  inserts_[request].items = std::move(items);
  insert_line_.push_back(request);
  advance();
  return request;
}

Request Table::sample(std::size_t count) {
  const Request request = ++last_request_;
  samples_[request].count = count;
  sample_line_.push_back(request);
  advance();
  return request;
}

// A withdrawn request lets no request behind it run earlier: the limiter that holds one item back
// holds back every other.
std::vector<Key> Table::take_inserted(Request request) {
  auto node = inserts_.extract(request);
  Insert& insert = node.mapped();
  const std::size_t done = insert.keys.size() * insert.items.width;
  if (std::erase(insert_line_, request) > 0) {
    rows_->release(std::span<const Row>(insert.items.rows).subspan(done));
  }
  return std::move(insert.keys);
}

Picks Table::take_sampled(Request request) {
  auto node = samples_.extract(request);
  std::erase(sample_line_, request);
  return std::move(node.mapped().picks);
}

void Table::abandon(Request request) {
  if (inserts_.contains(request)) {
    take_inserted(request);
  } else if (const Picks picks = take_sampled(request); !picks.rows.empty()) {
    rows_->release(picks.rows);
  }
}

void Table::advance() {
  // Each may unblock the other.
  while (advance_inserts() || advance_samples()) {
  }
}

bool Table::advance_inserts() {
  bool advanced = false;
  while (!insert_line_.empty()) {
    const Request request = insert_line_.front();
    Insert& insert = inserts_.at(request);
    while (insert.keys.size() < insert.items.priorities.size() && limiter_.can_insert() &&
           (size_ < options_.max_size || remover_ != nullptr)) {
      insert_next(insert);
      advanced = true;
    }
    if (insert.keys.size() < insert.items.priorities.size()) break;
    std::erase(insert_line_, request);
    ended_.push_back(request);
  }
  return advanced;
}

bool Table::advance_samples() {
  bool advanced = false;
  while (!sample_line_.empty()) {
    Sample& sample = samples_.at(sample_line_.front());
    while (sample.picks.keys.size() < sample.count && size_ > 0) {
      const std::size_t wanted = sample.count - sample.picks.keys.size();
      const auto allowed =
          static_cast<std::size_t>(limiter_.samples_allowed(static_cast<std::int64_t>(wanted)));
      if (allowed == 0) break;
      // If a choice may remove its item, the next one is made without it.
      pick(sample, options_.max_times_sampled == 0 ? allowed : 1);
      advanced = true;
    }
    if (sample.picks.keys.size() < sample.count) break;
    ended_.push_back(sample_line_.front());
    sample_line_.pop_front();
  }
  return advanced;
}

void Table::insert_next(Insert& insert) {
  if (size_ >= options_.max_size) {
    Choice choice;
    remover_->choose(random_, {&choice, 1});
    remove_slot(choice.slot);
  }
  if (free_.empty()) {
    free_.push_back(static_cast<Slot>(items_.size()));
    items_.emplace_back();
  }
  const Slot slot = free_.back();
  const NewItems& items = insert.items;
  const std::size_t index = insert.keys.size();
  Item& item = items_[slot];
  ++item.generation;
  item.times_sampled = 0;
  item.pattern = items.pattern;
  const auto rows = items.rows.begin() + static_cast<std::ptrdiff_t>(index * items.width);
  item.rows.assign(rows, rows + static_cast<std::ptrdiff_t>(items.width));
  place(slot, items.priorities[index]);
  free_.pop_back();  // now, so that a lack of memory above leaves the slot free
  limiter_.inserted();
  insert.keys.push_back(key_of(slot));
}

void Table::place(Slot slot, double priority) {
  sampler_->insert(slot, priority);
  try {
    if (remover_ != nullptr) remover_->insert(slot, priority);
  } catch (...) {
    sampler_->remove(slot);
    throw;
  }
  Item& item = items_[slot];
  item.present = true;
  item.priority = priority;
  item.order = ++insertions_;
  ++size_;
}

void Table::pick(Sample& sample, std::size_t count) {
  choices_.resize(count);
  sampler_->choose(random_, choices_);
  limiter_.sampled(static_cast<std::int64_t>(count));
  for (const Choice& choice : choices_) add_pick(sample, choice);
}

void Table::add_pick(Sample& sample, const Choice& choice) {
  Item& item = items_[choice.slot];
  Picks& picks = sample.picks;
  picks.keys.push_back(key_of(choice.slot));
  picks.probabilities.push_back(choice.probability);
  picks.priorities.push_back(item.priority);
  picks.times_sampled.push_back(++item.times_sampled);
  picks.patterns.push_back(item.pattern);
  picks.rows.insert(picks.rows.end(), item.rows.begin(), item.rows.end());
  rows_->retain(item.rows);
  const std::uint32_t most = options_.max_times_sampled;
  if (most == 0) return;
  if (item.times_sampled >= most) remove_slot(choice.slot);
}

void Table::remove_slot(Slot slot) {
  Item& item = items_[slot];
  sampler_->remove(slot);
  if (remover_ != nullptr) remover_->remove(slot);
  rows_->release(item.rows);
  item.rows.clear();
  item.present = false;
  reuse(slot);
  --size_;
  limiter_.deleted();
}

// An empty slot can get another item, unless its keys are used up.
void Table::reuse(Slot slot) {
  if (items_[slot].generation < kLastGeneration) {
    free_.push_back(slot);
  }
}

std::size_t Table::update(std::span<const Key> keys, std::span<const double> priorities) {
  check_priorities(priorities);
  std::vector<Slot> slots;
  std::vector<double> there;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::optional<Slot> slot = find(keys[i]);
    if (!slot) continue;
    slots.push_back(*slot);
    there.push_back(priorities[i]);
    items_[*slot].priority = priorities[i];
  }
  sampler_->update(slots, there);
  if (remover_ != nullptr) {
    remover_->update(slots, there);
  }
  return slots.size();
}

std::size_t Table::remove(std::span<const Key> keys) {
  std::size_t removed = 0;
  for (const Key key : keys) {
    const std::optional<Slot> slot = find(key);
    if (!slot) continue;
    remove_slot(*slot);
    ++removed;
  }
  advance();
  return removed;
}

void Table::reset() {
  for (Slot slot = 0; slot < items_.size(); ++slot) {
    if (items_[slot].present) remove_slot(slot);
  }
  limiter_.set_counts({});
  advance();
}

void Table::check_priorities(std::span<const double> priorities) const {
  for (const double priority : priorities) {
    if (!std::isfinite(priority) || priority < 0) {
      throw Exception(
          ErrorCode::invalid_argument,
          "a priority must be finite and not negative, got " + std::to_string(priority));
    }
    for (const auto& selector : {std::optional(options_.sampler), options_.remover}) {
      if (!selector || selector->kind != SelectorKind::prioritized) continue;
      // Most need no power: it is at most the larger of the priority and 1.
      if (priority <= 1 || (selector->exponent <= 1 && priority <= kLargestWeight)) continue;
      // Written so that NaN fails, too.
      if (!(weight_of(priority, selector->exponent) <= kLargestWeight)) {
        throw Exception(ErrorCode::invalid_argument,
                        "priority " + std::to_string(priority) + " to the power of " +
                            std::to_string(selector->exponent) + " is too large");
      }
    }
  }
}

std::optional<Slot> Table::find(Key key) const {
  const auto slot = static_cast<Slot>(key & 0xffffffff);
  if (slot >= items_.size() || !items_[slot].present) return std::nullopt;
  if (key_of(slot) != key) return std::nullopt;
  return slot;
}

TableState Table::state() const {
  TableState state;
  state.counts = limiter_.counts();
  state.seed = Random(random_).next();  // from a copy: saving changes nothing
  std::vector<Slot> present;
  for (Slot slot = 0; slot < items_.size(); ++slot) {
    state.generations.push_back(items_[slot].generation);
    if (items_[slot].present) present.push_back(slot);
  }
  std::sort(present.begin(), present.end(),
            [this](Slot a, Slot b) { return items_[a].order < items_[b].order; });
  for (const Slot slot : present) {
    const Item& item = items_[slot];
    state.items.push_back(
        {key_of(slot), item.priority, item.times_sampled, item.pattern, item.rows});
  }
  return state;
}

void Table::restore(TableState state) {
  items_.resize(state.generations.size());
  for (Slot slot = 0; slot < items_.size(); ++slot) {
    items_[slot].generation = state.generations[slot];
  }
  for (ItemState& saved : state.items) {
    const auto slot = static_cast<Slot>(saved.key & 0xffffffff);
    Item& item = items_[slot];
    item.generation = static_cast<std::uint32_t>(saved.key >> 32);
    item.times_sampled = saved.times_sampled;
    item.pattern = saved.pattern;
    item.rows = std::move(saved.rows);
    place(slot, saved.priority);
  }
  for (Slot slot = 0; slot < items_.size(); ++slot) {
    if (!items_[slot].present) reuse(slot);
  }
  random_ = Random(state.seed);
  limiter_.set_counts(state.counts);
  advance();
}

}  // namespace moolink::replay
