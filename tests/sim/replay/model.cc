#include "replay/model.h"

#include <algorithm>
#include <utility>

namespace moolink::sim {

void TableModel::insert(std::uint64_t request, std::deque<Item> items) {
  inserts_[request].left = std::move(items);
  insert_line_.push_back(request);
}

void TableModel::sample(std::uint64_t request, std::size_t count) {
  samples_[request].count = count;
  sample_line_.push_back(request);
}

TableModel::Insert TableModel::withdraw_insert(std::uint64_t request) {
  std::erase(insert_line_, request);
  return std::move(inserts_.extract(request).mapped());
}

TableModel::Sample TableModel::withdraw_sample(std::uint64_t request) {
  std::erase(sample_line_, request);
  return std::move(samples_.extract(request).mapped());
}

bool TableModel::ended(std::uint64_t request) const {
  const auto waits = [request](const auto& line) {
    return std::find(line.begin(), line.end(), request) != line.end();
  };
  return !waits(insert_line_) && !waits(sample_line_);
}

void TableModel::update(std::uint64_t name, double priority) {
  for (Item& item : items_) {
    if (item.name != name) continue;
    item.priority = priority;
    item.change = ++orders_;
  }
}

void TableModel::remove(std::uint64_t name) {
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].name == name) return erase(i);
  }
}

void TableModel::reset() {
  items_.clear();
  counts_ = {};
}

void TableModel::restart() {
  std::sort(items_.begin(), items_.end(),
            [](const Item& a, const Item& b) { return a.order < b.order; });
  for (Item& item : items_) item.order = item.change = ++orders_;
}

void TableModel::advance() {
  bool advanced = true;
  while (advanced) {
    advanced = false;
    while (insert_one()) advanced = true;
    while (sample_one()) advanced = true;
  }
}

bool TableModel::insert_one() {
  if (insert_line_.empty()) return false;
  Insert& insert = inserts_.at(insert_line_.front());
  const replay::LimiterOptions& limits = options_.limiter;
  const double error = static_cast<double>(counts_.inserts + 1) * limits.samples_per_insert -
                       static_cast<double>(counts_.samples);
  if (counts_.size() + 1 > limits.min_size && error > limits.max_diff) return false;
  if (items_.size() == options_.max_size) {
    if (!options_.remover) return false;
    erase(choose(*options_.remover));
  }
  Item item = insert.left.front();
  insert.left.pop_front();
  item.order = item.change = ++orders_;
  items_.push_back(item);
  ++counts_.inserts;
  ++insert.done;
  if (insert.left.empty()) insert_line_.pop_front();
  return true;
}

bool TableModel::sample_one() {
  if (sample_line_.empty() || items_.empty()) return false;
  Sample& sample = samples_.at(sample_line_.front());
  const replay::LimiterOptions& limits = options_.limiter;
  const double error = static_cast<double>(counts_.inserts) * limits.samples_per_insert -
                       static_cast<double>(counts_.samples + 1);
  if (counts_.size() < limits.min_size || error < limits.min_diff) return false;
  const std::size_t index = choose(options_.sampler);
  Item& item = items_[index];
  ++counts_.samples;
  sample.picks.push_back({item.name, ++item.times});
  if (item.times == options_.max_times_sampled) erase(index);
  if (sample.picks.size() == sample.count) sample_line_.pop_front();
  return true;
}

std::size_t TableModel::choose(const replay::SelectorOptions& selector) const {
  const auto before = [&selector](const Item& a, const Item& b) {
    switch (selector.kind) {
      case replay::SelectorKind::fifo:
        return a.order < b.order;
      case replay::SelectorKind::lifo:
        return a.order > b.order;
      case replay::SelectorKind::min_heap:
        return std::pair(a.priority, a.change) < std::pair(b.priority, b.change);
      default:
        return std::pair(-a.priority, a.change) < std::pair(-b.priority, b.change);
    }
  };
  return static_cast<std::size_t>(std::min_element(items_.begin(), items_.end(), before) -
                                  items_.begin());
}

void TableModel::erase(std::size_t index) {
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(index));
  ++counts_.deletes;
}

}  // namespace moolink::sim
