#include "bind/replay_state.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bind/numpy_vectors.h"

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

}  // namespace

nb::dict to_dict(const replay::TableState& state) {
  std::vector<replay::Key> keys;
  std::vector<double> priorities;
  std::vector<std::uint32_t> times;
  std::vector<std::uint32_t> patterns;
  std::vector<std::uint32_t> widths;
  std::vector<replay::Row> rows;
  for (const replay::ItemState& item : state.items) {
    keys.push_back(item.key);
    priorities.push_back(item.priority);
    times.push_back(item.times_sampled);
    patterns.push_back(item.pattern);
    widths.push_back(static_cast<std::uint32_t>(item.rows.size()));
    rows.insert(rows.end(), item.rows.begin(), item.rows.end());
  }
  nb::dict result;
  result["counts"] =
      to_numpy(std::vector{state.counts.inserts, state.counts.samples, state.counts.deletes},
               tensor::DType::int64);
  result["seed"] = to_numpy(std::vector{state.seed}, tensor::DType::uint64);
  result["generations"] = to_numpy(state.generations, tensor::DType::uint32);
  result["keys"] = to_numpy(keys, tensor::DType::int64);
  result["priorities"] = to_numpy(priorities, tensor::DType::float64);
  result["times_sampled"] = to_numpy(times, tensor::DType::uint32);
  result["patterns"] = to_numpy(patterns, tensor::DType::uint32);
  result["widths"] = to_numpy(widths, tensor::DType::uint32);
  result["rows"] = to_numpy(rows, tensor::DType::uint32);
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
