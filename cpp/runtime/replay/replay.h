#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/at_fork.h"
#include "base/buffer.h"
#include "base/error.h"
#include "base/time.h"
#include "replay/table.h"
#include "runtime/replay/replay_store.h"

namespace moolink::runtime {

// The tables of a replay with the memory of their items. One lock, held for bookkeeping and never
// while arrays are copied: references keep the rows unchanged meanwhile.
class Replay : public AtFork {
 public:
  // Called about every 50 ms while a thread waits, without the lock; ends the wait by throwing, or,
  // as at the deadline, by returning true.
  using Interrupt = std::function<bool()>;
  // Wraps each thread's wait: it releases locks that others need.
  using Waiting = std::function<void(const std::function<void()>& wait)>;

  // A sample and its place: its rows are retained until it is copied.
  struct Picked {
    replay::Picks picks;
    std::vector<const ReplayPattern*> patterns;  // of each item
    std::vector<ReplayColumn> layouts;           // of the arrays of one item
    std::optional<ReplayStore::View> view;       // none: nothing was sampled

    std::size_t size() const { return picks.keys.size(); }
  };
  // All tables at one moment. Retains the rows of each store that any item refers to.
  struct Snapshot {
    std::vector<replay::TableState> tables;
    std::vector<std::vector<replay::Row>> rows;  // by store, rising
  };
  struct TableStats {
    replay::Limiter::Counts counts;
    std::size_t size = 0;
    std::size_t waiting_inserts = 0;
    std::size_t waiting_samples = 0;
  };
  struct StoreStats {
    std::size_t rows_used = 0;
    std::size_t row_bytes = 0;
    std::size_t bytes = 0;
  };

  // The place of rows: in a SpillFile a forked child would write to its parent's, so the child's
  // replay is closed, and rows outside memory are read ahead.
  enum class Blocks { in_memory, in_file };

  // `blocks` provides the memory of rows.
  Replay(std::shared_ptr<Allocator> blocks, Blocks blocks_are, Waiting waiting)
      : blocks_are_(blocks_are), blocks_(std::move(blocks)), waiting_(std::move(waiting)) {
    join_forks(Rank::memory);
  }
  virtual ~Replay() { leave_forks(Rank::memory); }

  std::uint32_t add_table(const replay::TableOptions& options, std::uint64_t seed);
  std::uint32_t add_store(std::vector<ReplayColumn> columns);
  // Throws Exception{invalid_argument} if it does not fit its store.
  std::uint32_t add_pattern(ReplayPattern pattern);

  // Rows that the caller refers to, with their place.
  std::pair<std::vector<replay::Row>, ReplayStore::View> take(std::uint32_t store,
                                                              std::size_t count);
  const std::vector<ReplayColumn>& columns(std::uint32_t store) const;
  void release(std::uint32_t store, std::span<const replay::Row> rows);
  // Gives up references at the end of a scope.
  struct Held {
    Replay& replay;
    std::uint32_t store;
    std::span<const replay::Row> rows;

    ~Held() { replay.release(store, rows); }
  };
  // The rows' bytes of one column, one after another.
  void read(std::uint32_t store, std::uint32_t column, std::span<const replay::Row> rows,
            std::byte* out) const;
  // The opposite, for rows with no other reference.
  void write(std::uint32_t store, std::uint32_t column, std::span<const replay::Row> rows,
             const std::byte* from);

  // Returns the keys of the items that were inserted before the deadline, maybe only some. Throws
  // Exception{invalid_argument} if they differ from the table's, Exception{closed}.
  std::vector<replay::Key> insert(std::uint32_t table, replay::NewItems items, Time deadline,
                                  const Interrupt& interrupt);
  // The same for samples: the caller must copy any that it gets. Throws Exception{invalid_argument}
  // if their arrays would have more than 4 GB.
  Picked sample(std::uint32_t table, std::size_t count, Time deadline, const Interrupt& interrupt);
  // The arrays of a batch, each with all items; without the lock, and takes a while. `lent`: other
  // processes will read them.
  std::vector<MutableBuffer> copy(const Picked& picked, Allocator& allocator, bool lent);
  std::size_t update(std::uint32_t table, std::span<const replay::Key> keys,
                     std::span<const double> priorities);
  std::size_t remove(std::uint32_t table, std::span<const replay::Key> keys);
  void reset(std::uint32_t table);

  Snapshot snapshot();
  // Into a table that was just added; retains the rows of its items. Throws
  // Exception{invalid_argument} if the state cannot be that of a table.
  void restore(std::uint32_t table, replay::TableState state);

  TableStats table_stats(std::uint32_t table) const;
  std::vector<StoreStats> store_stats() const;
  // Every waiting thread, and every later request, gets Exception{closed}.
  void close();

 private:
  struct Waiter {
    std::condition_variable* changed;
    std::thread::id thread;
  };
  struct TableEntry {
    replay::Table table;
    std::optional<std::uint32_t> pattern;  // of its first items; all have the same layout
    std::size_t item_bytes = 0;            // of an item's arrays in a batch, once known
    std::map<replay::Request, Waiter> waiting;
  };
  using Lock = std::unique_lock<std::mutex>;

  // With the bytes of a row of the column.
  std::pair<ReplayStore::View, std::size_t> view_of(std::uint32_t store,
                                                    std::uint32_t column) const;
  void require_open() const {
    if (closed_) throw Exception(ErrorCode::closed, "the replay is closed");
  }
  void require_same_layout(TableEntry& entry, std::uint32_t pattern);
  // A batch has at most kLargestBatch bytes, or, for items of unknown size, that many items.
  void require_batch(const TableEntry& entry, std::size_t count) const;
  ReplayColumn layout_of(const ReplayPattern& pattern, const ReplayPiece& piece) const;
  void check_state(const replay::TableState& state) const;
  // Whether the request has ended before the deadline, or the replay was closed.
  void wait(Lock& lock, TableEntry& entry, replay::Request request, Time deadline,
            const Interrupt& interrupt);
  void wake(TableEntry& entry);

  void before_fork() noexcept override { mutex_.lock(); }
  void after_fork_in_parent() noexcept override { mutex_.unlock(); }
  void after_fork_in_child() noexcept override;

  mutable std::mutex mutex_;
  const Blocks blocks_are_;
  std::shared_ptr<Allocator> blocks_;
  const Waiting waiting_;
  bool closed_ = false;
  // Deques: elements do not move.
  std::deque<ReplayStore> stores_;
  std::deque<TableEntry> tables_;
  std::deque<ReplayPattern> patterns_;
};

}  // namespace moolink::runtime
