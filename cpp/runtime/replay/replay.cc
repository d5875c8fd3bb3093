#include "runtime/replay/replay.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/streaming_copy.h"
#include "io/loop.h"
#include "memory/spill_file.h"

namespace moolink::runtime {
namespace {

constexpr auto kInterruptEvery = std::chrono::milliseconds(50);
constexpr std::size_t kPrefetch = 8;                              // items ahead
constexpr std::size_t kLargestBatch = std::size_t{4} << 30;       // bytes
constexpr std::size_t kLargestFirstBatch = std::size_t{1} << 20;  // items of unknown bytes
constexpr std::size_t kOfEachItem = 64;                           // bytes beside its arrays
constexpr std::size_t kPage = 4096;  // larger rows in a file are read from the disk as one
// Size from which a lent array is faster if its copy bypasses this process's cache.
constexpr std::size_t kPastCache = std::size_t{4} << 20;

void gather(const Replay::Picked& picked, const std::vector<MutableBuffer>& arrays, bool lent,
            bool in_file) {
  const ReplayStore::View& view = *picked.view;
  const std::vector<replay::Row>& rows = picked.picks.rows;
  std::vector<std::size_t> begins;  // of each item in the picks' rows
  std::size_t begin = 0;
  for (const ReplayPattern* pattern : picked.patterns) {
    begins.push_back(begin);
    begin += pattern->width;
  }
  for (std::size_t piece = 0; piece < arrays.size(); ++piece) {
    std::byte* out = arrays[piece].data();
    const auto of = [&](std::size_t item) { return picked.patterns[item]->pieces[piece]; };
    const std::size_t bytes = picked.layouts[piece].bytes / of(0).rows();
    const bool read_ahead = in_file && bytes > kPage;
    const bool past_cache = lent && arrays[piece].size() >= kPastCache;
    const std::size_t whole = past_cache ? std::numeric_limits<std::size_t>::max() : 0;
    for (std::size_t item = 0; item < picked.size(); ++item) {
      if (const std::size_t later = item + kPrefetch; later < picked.size()) {
        const replay::Row* first = &rows[begins[later] + of(later).first];
        __builtin_prefetch(view.at(*first, of(later).column));
        for (std::uint32_t row = 0; read_ahead && row < of(later).rows(); ++row) {
          memory::SpillFile::read_ahead({view.at(first[row], of(later).column), bytes});
        }
      }
      for (std::uint32_t row = 0; row < of(item).rows(); ++row, out += bytes) {
        const std::byte* from = view.at(rows[begins[item] + of(item).first + row], of(item).column);
        streaming_copy({out, bytes}, {from, bytes}, whole);
      }
    }
  }
}

}  // namespace

std::uint32_t Replay::add_table(const replay::TableOptions& options, std::uint64_t seed) {
  const Lock lock(mutex_);
  tables_.push_back({replay::Table(options, seed), std::nullopt, 0, {}});
  return static_cast<std::uint32_t>(tables_.size() - 1);
}

std::uint32_t Replay::add_store(std::vector<ReplayColumn> columns) {
  const Lock lock(mutex_);
  stores_.emplace_back(std::move(columns), *blocks_);
  return static_cast<std::uint32_t>(stores_.size() - 1);
}

std::uint32_t Replay::add_pattern(ReplayPattern pattern) {
  const Lock lock(mutex_);
  const std::size_t columns = stores_.at(pattern.store).columns().size();
  for (const ReplayPiece& piece : pattern.pieces) {
    if (piece.column >= columns || std::uint64_t{piece.first} + piece.rows() > pattern.width) {
      throw Exception(ErrorCode::invalid_argument, "an item's array is of none of its rows");
    }
  }
  patterns_.push_back(std::move(pattern));
  return static_cast<std::uint32_t>(patterns_.size() - 1);
}

std::pair<std::vector<replay::Row>, ReplayStore::View> Replay::take(std::uint32_t store,
                                                                    std::size_t count) {
  Lock lock(mutex_);
  require_open();
  ReplayStore& of = stores_.at(store);
  std::vector<replay::Row> rows = of.take(count);
  ReplayStore::View view = of.view();
  lock.unlock();
  if (blocks_are_ == Blocks::in_file) {
    // A write to a reused row would first read its pages from the disk.
    for (std::uint32_t column = 0; column < of.columns().size(); ++column) {
      const std::size_t bytes = of.columns()[column].bytes;
      if (bytes <= kPage) continue;
      for (const replay::Row row : rows) {
        memory::SpillFile::read_ahead({view.at(row, column), bytes});
      }
    }
  }
  return {std::move(rows), std::move(view)};
}

const std::vector<ReplayColumn>& Replay::columns(std::uint32_t store) const {
  const Lock lock(mutex_);
  return stores_.at(store).columns();
}

void Replay::release(std::uint32_t store, std::span<const replay::Row> rows) {
  const Lock lock(mutex_);
  stores_.at(store).rows().release(rows);
}

void Replay::read(std::uint32_t store, std::uint32_t column, std::span<const replay::Row> rows,
                  std::byte* out) const {
  const auto [view, bytes] = view_of(store, column);
  for (const replay::Row row : rows) {
    std::memcpy(out, view.at(row, column), bytes);
    out += bytes;
  }
}

void Replay::write(std::uint32_t store, std::uint32_t column, std::span<const replay::Row> rows,
                   const std::byte* from) {
  const auto [view, bytes] = view_of(store, column);
  for (const replay::Row row : rows) {
    std::memcpy(view.at(row, column), from, bytes);
    from += bytes;
  }
}

std::pair<ReplayStore::View, std::size_t> Replay::view_of(std::uint32_t store,
                                                          std::uint32_t column) const {
  const Lock lock(mutex_);
  const ReplayStore& of = stores_.at(store);
  return {of.view(), of.columns().at(column).bytes};
}

ReplayColumn Replay::layout_of(const ReplayPattern& pattern, const ReplayPiece& piece) const {
  ReplayColumn layout = stores_.at(pattern.store).columns()[piece.column];
  if (piece.count != 0) layout.shape.insert(layout.shape.begin(), piece.count);
  layout.bytes *= piece.rows();
  return layout;
}

void Replay::require_same_layout(TableEntry& entry, std::uint32_t pattern) {
  if (!entry.pattern) {
    const ReplayPattern& first = patterns_.at(pattern);
    std::size_t bytes = 0;
    for (const ReplayPiece& piece : first.pieces) bytes += layout_of(first, piece).bytes;
    entry.table.set_rows(stores_.at(first.store).rows());
    entry.item_bytes = bytes;
    entry.pattern = pattern;  // last: layout_of may throw for lack of memory
    return;
  }
  if (*entry.pattern == pattern) return;
  const ReplayPattern& first = patterns_.at(*entry.pattern);
  const ReplayPattern& other = patterns_.at(pattern);
  if (first.store != other.store || first.pieces.size() != other.pieces.size()) {
    throw Exception(ErrorCode::invalid_argument,
                    "the table's items are made of other steps: a table has items of one layout");
  }
  for (std::size_t i = 0; i < first.pieces.size(); ++i) {
    const ReplayColumn expected = layout_of(first, first.pieces[i]);
    const ReplayColumn given = layout_of(other, other.pieces[i]);
    if (expected.dtype == given.dtype && expected.shape == given.shape) continue;
    throw Exception(ErrorCode::invalid_argument,
                    given.name + ": expected " +
                        tensor::layout_text(expected.dtype, expected.shape) +
                        ", as in the table's other items, got " +
                        tensor::layout_text(given.dtype, given.shape));
  }
}

void Replay::require_batch(const TableEntry& entry, std::size_t count) const {
  const std::size_t most =
      entry.pattern ? std::max<std::size_t>(1, kLargestBatch / (entry.item_bytes + kOfEachItem))
                    : kLargestFirstBatch;
  if (count <= most) return;
  throw Exception(
      ErrorCode::invalid_argument,
      "batch_size must be at most " + std::to_string(most) + ", got " + std::to_string(count));
}

std::vector<replay::Key> Replay::insert(std::uint32_t table, replay::NewItems items, Time deadline,
                                        const Interrupt& interrupt) {
  Lock lock(mutex_);
  require_open();
  TableEntry& of = tables_.at(table);
  of.table.check_priorities(items.priorities);
  const ReplayPattern& pattern = patterns_.at(items.pattern);
  if (pattern.width * items.priorities.size() != items.rows.size()) {
    throw Exception(ErrorCode::invalid_argument,
                    "an item needs so many steps: " + std::to_string(pattern.width));
  }
  if (items.priorities.empty()) return {};
  require_same_layout(of, items.pattern);
  items.width = pattern.width;
  stores_.at(pattern.store).rows().retain(items.rows);
  const replay::Request request = of.table.insert(std::move(items));
  wait(lock, of, request, deadline, interrupt);
  return of.table.take_inserted(request);
}

Replay::Picked Replay::sample(std::uint32_t table, std::size_t count, Time deadline,
                              const Interrupt& interrupt) {
  Picked picked;
  Lock lock(mutex_);
  require_open();
  TableEntry& of = tables_.at(table);
  require_batch(of, count);
  const replay::Request request = of.table.sample(count);
  wait(lock, of, request, deadline, interrupt);
  picked.picks = of.table.take_sampled(request);
  if (picked.size() == 0) return picked;
  try {
    require_batch(of, picked.size());  // the first item may have arrived meanwhile
  } catch (...) {
    stores_.at(patterns_[picked.picks.patterns.front()].store).rows().release(picked.picks.rows);
    throw;
  }
  for (const std::uint32_t pattern : picked.picks.patterns) {
    picked.patterns.push_back(&patterns_[pattern]);
  }
  const ReplayPattern& first = *picked.patterns.front();
  for (const ReplayPiece& piece : first.pieces) {
    picked.layouts.push_back(layout_of(first, piece));
  }
  picked.view = stores_[first.store].view();
  return picked;
}

std::vector<MutableBuffer> Replay::copy(const Picked& picked, Allocator& allocator, bool lent) {
  const Held held{*this, picked.patterns.front()->store, picked.picks.rows};
  std::vector<MutableBuffer> arrays;
  for (const ReplayColumn& layout : picked.layouts) {
    arrays.push_back(allocator.allocate(layout.bytes * picked.size()));
  }
  gather(picked, arrays, lent, blocks_are_ == Blocks::in_file);
  return arrays;
}

void Replay::wait(Lock& lock, TableEntry& of, replay::Request request, Time deadline,
                  const Interrupt& interrupt) {
  std::condition_variable changed;
  of.waiting.emplace(request, Waiter{&changed, std::this_thread::get_id()});
  wake(of);  // Others', too, that this request has unblocked.
  const auto ended = [&] { return !of.waiting.contains(request) || closed_; };
  std::exception_ptr raised;
  if (!ended() && deadline > Time{}) {
    lock.unlock();
    waiting_([&] {
      lock.lock();
      bool given_up = false;
      while (!ended() && !given_up) {
        const Time now = io::now();
        if (now >= deadline) break;
        changed.wait_until(lock, std::min<Time>(deadline, now + kInterruptEvery));
        if (ended() || !interrupt) continue;
        lock.unlock();
        try {
          given_up = interrupt();
        } catch (...) {
          raised = std::current_exception();
          given_up = true;
        }
        lock.lock();
      }
      lock.unlock();
    });
    lock.lock();
  }
  of.waiting.erase(request);
  if (raised || closed_) {
    // No caller takes the request's outcome: it is withdrawn.
    of.table.abandon(request);
    if (raised) std::rethrow_exception(raised);
    require_open();
  }
}

void Replay::wake(TableEntry& of) {
  for (const replay::Request request : of.table.take_ended()) {
    const auto waiting = of.waiting.extract(request);
    if (!waiting.empty()) waiting.mapped().changed->notify_all();
  }
}

std::size_t Replay::update(std::uint32_t table, std::span<const replay::Key> keys,
                           std::span<const double> priorities) {
  const Lock lock(mutex_);
  require_open();
  return tables_.at(table).table.update(keys, priorities);
}

std::size_t Replay::remove(std::uint32_t table, std::span<const replay::Key> keys) {
  const Lock lock(mutex_);
  require_open();
  TableEntry& of = tables_.at(table);
  const std::size_t removed = of.table.remove(keys);
  wake(of);
  return removed;
}

void Replay::reset(std::uint32_t table) {
  const Lock lock(mutex_);
  require_open();
  TableEntry& of = tables_.at(table);
  of.table.reset();
  wake(of);
}

Replay::Snapshot Replay::snapshot() {
  const Lock lock(mutex_);
  require_open();
  Snapshot snapshot;
  snapshot.rows.resize(stores_.size());
  for (const TableEntry& of : tables_) {
    snapshot.tables.push_back(of.table.state());
    for (const replay::ItemState& item : snapshot.tables.back().items) {
      std::vector<replay::Row>& rows = snapshot.rows[patterns_[item.pattern].store];
      rows.insert(rows.end(), item.rows.begin(), item.rows.end());
    }
  }
  for (std::size_t store = 0; store < stores_.size(); ++store) {
    std::vector<replay::Row>& rows = snapshot.rows[store];
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    stores_[store].rows().retain(rows);
  }
  return snapshot;
}

void Replay::check_state(const replay::TableState& state) const {
  std::vector<bool> seen(state.generations.size());
  for (const replay::ItemState& item : state.items) {
    const auto slot = static_cast<std::size_t>(item.key & 0xffffffff);
    const bool known = slot < seen.size() && !seen[slot] && item.pattern < patterns_.size() &&
                       item.rows.size() == patterns_[item.pattern].width;
    if (!known) throw Exception(ErrorCode::invalid_argument, "no table has such items");
    seen[slot] = true;
  }
}

void Replay::restore(std::uint32_t table, replay::TableState state) {
  const Lock lock(mutex_);
  TableEntry& of = tables_.at(table);
  check_state(state);
  for (const replay::ItemState& item : state.items) {
    of.table.check_priorities({&item.priority, 1});
    require_same_layout(of, item.pattern);
  }
  for (const replay::ItemState& item : state.items) {
    stores_.at(patterns_[item.pattern].store).rows().retain(item.rows);
  }
  of.table.restore(std::move(state));
}

Replay::TableStats Replay::table_stats(std::uint32_t table) const {
  const Lock lock(mutex_);
  const replay::Table& of = tables_.at(table).table;
  return {of.counts(), of.size(), of.waiting_inserts(), of.waiting_samples()};
}

std::vector<Replay::StoreStats> Replay::store_stats() const {
  const Lock lock(mutex_);
  std::vector<StoreStats> stats;
  for (const ReplayStore& store : stores_) {
    stats.push_back({store.rows().used(), store.row_bytes(), store.bytes()});
  }
  return stats;
}

void Replay::after_fork_in_child() noexcept {
  if (blocks_are_ == Blocks::in_file) closed_ = true;
  for (TableEntry& of : tables_) {
    // The other threads exist only in the parent. This one may wait: a signal handler has forked.
    std::erase_if(of.waiting, [&](const auto& waiting) {
      const bool gone = waiting.second.thread != std::this_thread::get_id();
      if (gone) of.table.abandon(waiting.first);
      return gone;
    });
  }
  mutex_.unlock();
}

void Replay::close() {
  const Lock lock(mutex_);
  closed_ = true;
  for (TableEntry& of : tables_) {
    for (const auto& [request, waiter] : of.waiting) waiter.changed->notify_all();
  }
}

}  // namespace moolink::runtime
