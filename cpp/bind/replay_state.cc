#include "bind/replay_state.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace moolink::bind {
namespace {

template <class T>
std::vector<T> column_of(const nb::dict& state, const char* name, std::optional<std::size_t> size) {
  const auto given = vector_of(nb::cast<Given<T>>(state[name]));
  if (size && given.size() != *size) {
    throw Exception(ErrorCode::invalid_argument, std::string("no table has such ") + name);
  }
  return given;
}

// One field of every item, as an array.
template <class T>
nb::object column(const std::vector<replay::ItemState>& items, T replay::ItemState::* field) {
  std::vector<T> values;
  for (const replay::ItemState& item : items) values.push_back(item.*field);
  return to_numpy(values);
}

}  // namespace

nb::dict to_dict(const replay::TableState& state) {
  std::vector<std::uint32_t> widths;
  std::vector<replay::Row> rows;
  for (const replay::ItemState& item : state.items) {
    widths.push_back(static_cast<std::uint32_t>(item.rows.size()));
    rows.insert(rows.end(), item.rows.begin(), item.rows.end());
  }
  const replay::Limiter::Counts& counts = state.counts;
  nb::dict result;
  result["counts"] = to_numpy(std::vector{counts.inserts, counts.samples, counts.deletes});
  result["seed"] = to_numpy(std::vector{state.seed});
  result["generations"] = to_numpy(state.generations);
  result["keys"] = column(state.items, &replay::ItemState::key);
  result["priorities"] = column(state.items, &replay::ItemState::priority);
  result["times_sampled"] = column(state.items, &replay::ItemState::times_sampled);
  result["patterns"] = column(state.items, &replay::ItemState::pattern);
  result["widths"] = to_numpy(widths);
  result["rows"] = to_numpy(rows);
  return result;
}

replay::TableState table_state(const nb::dict& state) {
  replay::TableState result;
  const auto counts = column_of<std::int64_t>(state, "counts", 3);
  result.counts = {counts[0], counts[1], counts[2]};
  result.seed = column_of<std::uint64_t>(state, "seed", 1).front();
  result.generations = column_of<std::uint32_t>(state, "generations", std::nullopt);
  const auto keys = column_of<replay::Key>(state, "keys", std::nullopt);
  const auto priorities = column_of<double>(state, "priorities", keys.size());
  const auto times = column_of<std::uint32_t>(state, "times_sampled", keys.size());
  const auto patterns = column_of<std::uint32_t>(state, "patterns", keys.size());
  const auto widths = column_of<std::uint32_t>(state, "widths", keys.size());
  std::size_t all = 0;
  for (const std::uint32_t width : widths) all += width;
  const auto rows = column_of<replay::Row>(state, "rows", all);
  auto row = rows.begin();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    result.items.push_back({keys[i], priorities[i], times[i], patterns[i], {row, row + widths[i]}});
    row += widths[i];
  }
  return result;
}

}  // namespace moolink::bind
