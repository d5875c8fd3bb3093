#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/enum_names.h"
#include "base/error.h"
#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/replay_state.h"
#include "bind/tensor.h"
#include "memory/pool.h"
#include "memory/spill_file.h"
#include "runtime/replay/replay.h"

namespace moolink::bind {
namespace {

using runtime::Replay;
using runtime::ReplayColumn;

using SelectorArgs = std::tuple<std::string, double>;
using LimiterArgs = std::tuple<double, std::int64_t, double, double>;

replay::SelectorOptions selector_of(const SelectorArgs& args) {
  constexpr auto kNames = enum_names<replay::SelectorKind::max_heap>(
      "uniform", "prioritized", "fifo", "lifo", "min_heap", "max_heap");
  const auto& [name, exponent] = args;
  return {value_named(kNames, name, "no selector is called "), exponent};
}

// Called now and then by a waiting thread: runs signal handlers, and `stop`, which ends the wait by
// returning True. `stop` is borrowed.
Replay::Interrupt interrupt(const std::optional<nb::callable>& stop) {
  return [signals = signal_check(), stop = stop ? stop->ptr() : nullptr] {
    if (signals) signals();
    if (stop == nullptr) return false;
    const nb::gil_scoped_acquire locked;
    return nb::cast<bool>(nb::handle(stop)());
  };
}

// Around a wait, without the GIL and without a worker's slot.
void wait_without_slot(const std::function<void()>& wait) {
  LentSlot slot;
  slot.enter();
  const GilRelease unlocked;
  wait();
}

using Leaves = nb::typed<nb::list, nb::any>;  // of a step: one array for each column

class ReplayCore : public Replay {
 public:
  explicit ReplayCore(const std::optional<std::string>& spill)
      : Replay(memory_of(spill), spill ? Blocks::in_file : Blocks::in_memory, wait_without_slot) {}

  std::uint32_t add_table(const SelectorArgs& sampler, const std::optional<SelectorArgs>& remover,
                          std::uint64_t max_size, std::uint32_t max_times_sampled,
                          const LimiterArgs& limiter, std::uint64_t seed) {
    replay::TableOptions options;
    options.sampler = selector_of(sampler);
    if (remover) options.remover = selector_of(*remover);
    options.max_size = max_size;
    options.max_times_sampled = max_times_sampled;
    const auto& [samples_per_insert, min_size, min_diff, max_diff] = limiter;
    options.limiter = {samples_per_insert, min_size, min_diff, max_diff};
    return Replay::add_table(options, seed);
  }

  std::uint32_t add_store(
      const std::vector<std::tuple<std::string, std::string, tensor::Shape>>& columns) {
    std::vector<ReplayColumn> made;
    for (const auto& [name, dtype, shape] : columns) {
      const auto type = tensor::dtype_from_name(dtype);
      if (!type) {
        std::string text = name;
        type_error(text.append(": arrays of dtype '").append(dtype).append("' cannot be stored"));
      }
      const auto bytes = tensor::byte_size(tensor::item_size(*type), shape);
      if (!bytes) value_error(name + ": no array has this shape");
      made.push_back({name, *type, shape, static_cast<std::size_t>(*bytes)});
    }
    return Replay::add_store(std::move(made));
  }

  std::uint32_t add_pattern(
      std::uint32_t store, std::uint32_t width,
      const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>>& pieces) {
    runtime::ReplayPattern pattern{store, width, {}};
    for (const auto& [column, first, count] : pieces) {
      pattern.pieces.push_back({column, first, count});
    }
    return Replay::add_pattern(std::move(pattern));
  }

  replay::Row append(std::uint32_t store, const Leaves& leaves) {
    return put(store, leaves, std::nullopt).front();
  }

  nb::object extend(std::uint32_t store, const Leaves& leaves, std::size_t steps) {
    return to_numpy(put(store, leaves, steps));
  }

  // A step that is an item; None: it was not inserted before the time-out.
  std::optional<replay::Key> insert_step(std::uint32_t table, std::uint32_t pattern,
                                         std::uint32_t store, const Leaves& leaves, double priority,
                                         std::optional<double> timeout) {
    replay::NewItems items;
    items.pattern = pattern;
    const std::vector<replay::Row> rows = put(store, leaves, std::nullopt);
    const Held held{*this, store, rows};
    items.rows = rows;
    items.priorities = {priority};
    const auto keys =
        Replay::insert(table, std::move(items), deadline(timeout), interrupt(std::nullopt));
    return keys.empty() ? std::nullopt : std::optional(keys.front());
  }

  // Rows to write; the caller holds a reference to each.
  nb::object take_array(std::uint32_t store, std::size_t count) {
    return to_numpy(Replay::take(store, count).first);
  }

  void release(std::uint32_t store, const Given<replay::Row>& rows) {
    Replay::release(store, span_of(rows));
  }

  nb::object insert(std::uint32_t table, std::uint32_t pattern, const Given<replay::Row>& rows,
                    const Given<double>& priorities, std::optional<double> timeout,
                    const std::optional<nb::callable>& stop) {
    replay::NewItems items;
    items.pattern = pattern;
    items.rows = vector_of(rows);
    items.priorities = vector_of(priorities);
    return to_numpy(Replay::insert(table, std::move(items), deadline(timeout), interrupt(stop)));
  }

  // (arrays, keys, probabilities, priorities, times sampled); None: nothing before the time-out.
  nb::object sample(std::uint32_t table, std::size_t count, std::optional<double> timeout,
                    std::string_view arrays, bool lend, const std::optional<nb::callable>& stop) {
    const ArrayKind kind = parse_array_kind(arrays);
    const auto context = default_context();
    const Picked picked = Replay::sample(table, count, deadline(timeout), interrupt(stop));
    if (picked.size() == 0) return nb::none();
    Allocator& allocator = lend ? static_cast<Allocator&>(context->lending()) : context->pool();
    std::vector<MutableBuffer> copied = without_gil([&] { return copy(picked, allocator, lend); });
    nb::list batch;
    for (std::size_t i = 0; i < copied.size(); ++i) {
      const ReplayColumn& layout = picked.layouts[i];
      tensor::Shape shape = layout.shape;
      shape.insert(shape.begin(), static_cast<std::int64_t>(picked.size()));
      batch.append(export_tensor(std::move(copied[i]),
                                 {wire::Framework::numpy, layout.dtype, {}, std::move(shape)},
                                 kind));
    }
    const replay::Picks& picks = picked.picks;
    return nb::make_tuple(batch, to_numpy(picks.keys), to_numpy(picks.probabilities),
                          to_numpy(picks.priorities), to_numpy(picks.times_sampled));
  }

  std::size_t update(std::uint32_t table, const Given<replay::Key>& keys,
                     const Given<double>& priorities) {
    if (keys.size() != priorities.size()) {
      throw nb::value_error("there must be as many priorities as keys");
    }
    return Replay::update(table, span_of(keys), span_of(priorities));
  }

  std::size_t remove(std::uint32_t table, const Given<replay::Key>& keys) {
    return Replay::remove(table, span_of(keys));
  }

  nb::dict table_stats_dict(std::uint32_t table) const {
    const TableStats stats = Replay::table_stats(table);
    nb::dict result;
    result["size"] = stats.size;
    result["inserts"] = stats.counts.inserts;
    result["samples"] = stats.counts.samples;
    result["removals"] = stats.counts.deletes;
    result["waiting_inserts"] = stats.waiting_inserts;
    result["waiting_samples"] = stats.waiting_samples;
    return result;
  }

  nb::list store_stats_list() const {
    nb::list result;
    for (const StoreStats& stats : Replay::store_stats()) {
      nb::dict store;
      store["steps"] = stats.rows_used;
      store["step_bytes"] = stats.row_bytes;
      store["reserved_bytes"] = stats.bytes;
      result.append(store);
    }
    return result;
  }

  // (states of the tables, rows of the stores), at one moment; the rows are retained.
  nb::tuple snapshot_tuple() {
    const Snapshot snapshot = Replay::snapshot();
    nb::list tables;
    for (const replay::TableState& state : snapshot.tables) tables.append(to_dict(state));
    nb::list rows;
    for (const auto& of : snapshot.rows) rows.append(to_numpy(of));
    return nb::make_tuple(tables, rows);
  }

  // The rows' bytes of one column, one after another.
  nb::object read(std::uint32_t store, std::uint32_t column, const Given<replay::Row>& rows) {
    const ReplayColumn& of = columns(store).at(column);
    MutableBuffer memory = default_context()->pool().allocate(of.bytes * rows.size());
    {
      const GilRelease unlocked;
      Replay::read(store, column, span_of(rows), memory.data());
    }
    return export_bytes(std::move(memory));
  }

  // The opposite, for rows with no other reference.
  void write(std::uint32_t store, std::uint32_t column, const Given<replay::Row>& rows,
             const Given<std::uint8_t>& bytes) {
    if (bytes.size() != rows.size() * columns(store).at(column).bytes) {
      throw nb::value_error("rows have another number of bytes");
    }
    const GilRelease unlocked;
    Replay::write(store, column, span_of(rows), reinterpret_cast<const std::byte*>(bytes.data()));
  }

  void restore(std::uint32_t table, const nb::dict& state) {
    Replay::restore(table, table_state(state));
  }

 private:
  static std::shared_ptr<Allocator> memory_of(const std::optional<std::string>& spill) {
    if (spill) return std::make_shared<memory::SpillFile>(*spill);
    return std::make_shared<memory::Pool>(0);
  }

  static Time deadline(std::optional<double> timeout) {
    return timeout == 0.0 ? Time{} : deadline_after(timeout);
  }

  std::vector<replay::Row> put(std::uint32_t store, const nb::list& leaves,
                               std::optional<std::size_t> steps);
};

// Throws unless the leaf can be copied into the column's rows.
ImportedTensor fitting(nb::handle leaf, const ReplayColumn& column,
                       std::optional<std::size_t> steps) {
  auto imported = import_tensor(leaf);
  if (!imported || !imported->numpy_type.empty()) {
    type_error(column.name + ": only arrays and tensors of numbers can be stored");
  }
  tensor::Shape expected = column.shape;
  if (steps) expected.insert(expected.begin(), static_cast<std::int64_t>(*steps));
  const tensor::TensorRef& given = imported->tensor;
  if (given.shape != expected || given.dtype != column.dtype) {
    throw Exception(ErrorCode::invalid_argument,
                    column.name + ": expected " + tensor::layout_text(column.dtype, expected) +
                        ", got " + tensor::layout_text(given.dtype, given.shape));
  }
  return std::move(*imported);
}

// One step, or with `steps` that many, stacked along the leaves' first dimension.
std::vector<replay::Row> ReplayCore::put(std::uint32_t store, const nb::list& leaves,
                                         std::optional<std::size_t> steps) {
  const std::vector<ReplayColumn>& columns = Replay::columns(store);
  if (leaves.size() != columns.size()) throw nb::value_error("a step has another number of arrays");
  std::vector<ImportedTensor> given;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    given.push_back(fitting(leaves[i], columns[i], steps));
    bytes += given.back().bytes();
  }
  auto [rows, view] = Replay::take(store, steps.value_or(1));
  Held held{*this, store, rows};
  copy_unlocked(bytes, [&, &rows = rows, &view = view] {
    for (std::uint32_t i = 0; i < columns.size(); ++i) {
      if (columns[i].bytes == 0) continue;
      if (rows.size() == 1) {
        copy_elements(given[i], view.at(rows.front(), i));
        continue;
      }
      const std::byte* from = given[i].tensor.data;
      MutableBuffer compact;
      if (given[i].stream != nullptr || !given[i].tensor.is_contiguous()) {
        compact = HeapAllocator().allocate(given[i].bytes());
        copy_elements(given[i], compact.data());
        from = compact.data();
      }
      for (const replay::Row row : rows) {
        std::memcpy(view.at(row, i), from, columns[i].bytes);
        from += columns[i].bytes;
      }
    }
  });
  held.rows = {};
  return std::move(rows);
}

void bind_steps(nb::class_<ReplayCore>& replay) {
  replay
      .def("add_table", &ReplayCore::add_table, nb::arg("sampler"), nb::arg("remover").none(),
           nb::arg("max_size"), nb::arg("max_times_sampled"), nb::arg("limiter"), nb::arg("seed"),
           "Adds a table; returns its index. Selectors are (name, exponent of the priorities); "
           "without a remover, inserts wait while the table is full. `limiter`: (samples per "
           "insert, least size to sample, least and greatest difference). `max_times_sampled` 0: "
           "no limit.")
      .def("add_store", &ReplayCore::add_store, nb::arg("columns"),
           "Adds a store for steps of these arrays: (name, dtype, shape) of each. Returns the "
           "store's index.")
      .def("add_pattern", &ReplayCore::add_pattern, nb::arg("store"), nb::arg("width"),
           nb::arg("pieces"),
           "Adds a pattern for items of `width` rows and these arrays: (column, first row, number "
           "of rows; 0: one row without the dimension of rows). Returns the pattern's index.")
      .def("append", &ReplayCore::append, nb::arg("store"), nb::arg("leaves"),
           "Stores a step, one array for each column; returns its row, to which the caller holds a "
           "reference.")
      .def("extend", &ReplayCore::extend, nb::arg("store"), nb::arg("leaves"), nb::arg("steps"),
           "Stores several steps, along the first dimension of each array; returns their rows, "
           "like append().",
           nb::sig("def extend(self, store: int, leaves: list[typing.Any], steps: int) -> "
                   "numpy.typing.NDArray[numpy.uint32]"))
      .def("insert_step", &ReplayCore::insert_step, nb::arg("table"), nb::arg("pattern"),
           nb::arg("store"), nb::arg("leaves"), nb::arg("priority"), nb::arg("timeout").none(),
           "Stores a step and inserts it as an item; returns its key, or None if the table had no "
           "room within `timeout` seconds.")
      .def("release", &ReplayCore::release, nb::arg("store"), nb::arg("rows"),
           "Gives up the caller's references to these rows.",
           nb::sig("def release(self, store: int, rows: numpy.typing.NDArray[numpy.uint32]) -> "
                   "None"));
}

void bind_items(nb::class_<ReplayCore>& replay) {
  replay
      .def("insert", &ReplayCore::insert, nb::arg("table"), nb::arg("pattern"), nb::arg("rows"),
           nb::arg("priorities"), nb::arg("timeout").none(), nb::arg("stop") = nb::none(),
           "Inserts items, whose rows are in `rows`, one item after another; returns the keys of "
           "those that were inserted within `timeout` seconds and before `stop` returned True.",
           nb::sig("def insert(self, table: int, pattern: int, rows: "
                   "numpy.typing.NDArray[numpy.uint32], priorities: "
                   "numpy.typing.NDArray[numpy.float64], timeout: float | None, stop: "
                   "typing.Callable[[], bool] | None = None) -> numpy.typing.NDArray[numpy.int64]"))
      .def("sample", &ReplayCore::sample, nb::arg("table"), nb::arg("count"),
           nb::arg("timeout").none(), nb::arg("arrays"), nb::arg("lend"),
           nb::arg("stop") = nb::none(),
           "Samples up to `count` items; returns (arrays, keys, probabilities, priorities, times "
           "sampled), or None if there was none within `timeout` seconds or before `stop` returned "
           "True. `lend`: puts them into memory that a reply can lend.",
           nb::sig("def sample(self, table: int, count: int, timeout: float | None, arrays: str, "
                   "lend: bool, stop: typing.Callable[[], bool] | None = None) -> "
                   "tuple[list[typing.Any], numpy.typing.NDArray[numpy.int64], "
                   "numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.float64], "
                   "numpy.typing.NDArray[numpy.uint32]] | None"))
      .def("update", &ReplayCore::update, nb::arg("table"), nb::arg("keys"), nb::arg("priorities"),
           "Sets priorities; returns how many of the keys are in the table.",
           nb::sig("def update(self, table: int, keys: numpy.typing.NDArray[numpy.int64], "
                   "priorities: numpy.typing.NDArray[numpy.float64]) -> int"))
      .def("remove", &ReplayCore::remove, nb::arg("table"), nb::arg("keys"),
           "Removes items; returns how many of the keys were in the table.",
           nb::sig("def remove(self, table: int, keys: numpy.typing.NDArray[numpy.int64]) -> int"))
      .def("reset", &Replay::reset, nb::arg("table"), "Empties a table and its counts.")
      .def("table_stats", &ReplayCore::table_stats_dict, nb::arg("table"),
           "Returns a table's counts.",
           nb::sig("def table_stats(self, table: int) -> moolink.reports.ReplayTableStats"));
}

void bind_states(nb::class_<ReplayCore>& replay) {
  replay
      .def("store_stats", &ReplayCore::store_stats_list, "Returns the memory use of each store.",
           nb::sig("def store_stats(self) -> list[moolink.reports.ReplayStoreStats]"))
      .def("snapshot", &ReplayCore::snapshot_tuple,
           "Returns the tables' states and the stores' rows in use, as of one moment. The caller "
           "holds references to the rows until it releases them.",
           nb::sig("def snapshot(self) -> tuple[list[dict[str, "
                   "numpy.typing.NDArray[typing.Any]]], "
                   "list[numpy.typing.NDArray[numpy.uint32]]]"))
      .def("read", &ReplayCore::read, nb::arg("store"), nb::arg("column"), nb::arg("rows"),
           "Returns the bytes of one column of these rows, one row after another.",
           nb::sig("def read(self, store: int, column: int, rows: "
                   "numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint8]"))
      .def("take", &ReplayCore::take_array, nb::arg("store"), nb::arg("count"),
           "Returns new rows for write(), to which the caller holds references.",
           nb::sig("def take(self, store: int, count: int) -> "
                   "numpy.typing.NDArray[numpy.uint32]"))
      .def("write", &ReplayCore::write, nb::arg("store"), nb::arg("column"), nb::arg("rows"),
           nb::arg("bytes"), "Writes the result of read() into rows from take().",
           nb::sig("def write(self, store: int, column: int, rows: "
                   "numpy.typing.NDArray[numpy.uint32], bytes: numpy.typing.NDArray[numpy.uint8]) "
                   "-> None"))
      .def("restore", &ReplayCore::restore, nb::arg("table"), nb::arg("state"),
           "Gives a table a state from snapshot(), with the row numbers of this replay.",
           nb::sig("def restore(self, table: int, state: dict[str, "
                   "numpy.typing.NDArray[typing.Any]]) -> None"));
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.def(
      "item_size", [](const std::string& dtype) { return tensor::item_size(dtype_named(dtype)); },
      nb::arg("dtype"), "Returns the size of an element in bytes.");
  nb::class_<ReplayCore> replay(
      m, "ReplayCore",
      "Tables of items and the memory of their steps; see moolink.Replay. A step is a row of a "
      "store's arrays. An item is several rows, seen through a pattern.");
  replay.def(
      nb::init<const std::optional<std::string>&>(), nb::arg("spill") = nb::none(),
      "`spill`: the directory of a file that holds the steps; None: the steps are in memory.");
  bind_steps(replay);
  bind_items(replay);
  bind_states(replay);
  replay.def("close", &Replay::close, "Ends all waits and refuses further use.");
}

}  // namespace moolink::bind
