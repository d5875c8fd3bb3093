#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/random.h"
#include "replay/limiter.h"
#include "replay/rows.h"
#include "replay/selector.h"

namespace moolink::replay {

// Names an item while its table lives: never used twice, not negative. The upper half is the
// generation of the slot in the lower half: the number of items that it has had.
using Key = std::int64_t;
// A slot that has had this many items gets no other.
inline constexpr std::uint32_t kLastGeneration = 0x7fffffff;
using Request = std::uint64_t;

struct TableOptions {
  SelectorOptions sampler;
  // Makes room in a full table; without it, inserts wait for items that were sampled often enough.
  std::optional<SelectorOptions> remover;
  std::uint64_t max_size = 1;
  std::uint32_t max_times_sampled = 0;  // 0: without limit
  LimiterOptions limiter;

  bool operator==(const TableOptions&) const = default;
};

// Items to insert: `width` rows each; the request holds a reference to each row.
struct NewItems {
  std::uint32_t pattern = 0;  // how an item's arrays are made of its rows
  std::size_t width = 0;
  std::vector<Row> rows;
  std::vector<double> priorities;
};

// Sampled items, one element of each list for each; their rows are retained for the receiver.
struct Picks {
  std::vector<Key> keys;
  std::vector<double> probabilities;
  std::vector<double> priorities;
  std::vector<std::uint32_t> times_sampled;  // this time included
  std::vector<std::uint32_t> patterns;
  std::vector<Row> rows;  // grouped by item
};

struct ItemState {
  Key key = 0;
  double priority = 0;
  std::uint32_t times_sampled = 0;
  std::uint32_t pattern = 0;
  std::vector<Row> rows;
};

struct TableState {
  Limiter::Counts counts;
  std::uint64_t seed = 0;                  // of future choices
  std::vector<std::uint32_t> generations;  // by slot
  std::vector<ItemState> items;            // oldest first
};

// The items of a table, by reference to rows, and the requests that wait to insert or to sample. A
// request runs item by item, as the limiter allows; requests of a kind run in order. No clock, no
// lock, no memory of arrays: the caller has those.
class Table {
 public:
  Table(const TableOptions& options, std::uint64_t seed);

  // The store of its items' rows, which outlives it; set before the first insert.
  void set_rows(Rows& rows) { rows_ = &rows; }

  Request insert(NewItems items);
  Request sample(std::size_t count);
  // Requests that have ended since the last call.
  std::vector<Request> take_ended() { return std::exchange(ended_, {}); }
  // The outcome of a request: complete once it has ended; before that the request is withdrawn, and
  // the rows of items that were not inserted are released.
  std::vector<Key> take_inserted(Request request);
  Picks take_sampled(Request request);
  // Withdraws a request whose outcome is not needed, and releases its samples.
  void abandon(Request request);

  // Returns how many of the keys still exist; the others are ignored. Throws
  // Exception{invalid_argument} for a priority that no item can have, and changes nothing then.
  std::size_t update(std::span<const Key> keys, std::span<const double> priorities);
  std::size_t remove(std::span<const Key> keys);
  // Removes all items, and resets the counts.
  void reset();

  // Throws Exception{invalid_argument}: negative, not finite, or too large for the exponent.
  void check_priorities(std::span<const double> priorities) const;

  TableState state() const;
  // Into a table without items; takes over a reference to each row.
  void restore(TableState state);

  const Limiter::Counts& counts() const { return limiter_.counts(); }
  std::size_t size() const { return size_; }
  std::size_t waiting_inserts() const { return insert_line_.size(); }
  std::size_t waiting_samples() const { return sample_line_.size(); }

 private:
  struct Item {
    std::uint32_t generation = 0;
    bool present = false;
    std::uint32_t times_sampled = 0;
    std::uint32_t pattern = 0;
    double priority = 0;
    std::uint64_t order = 0;  // of insertion
    std::vector<Row> rows;
  };
  struct Insert {
    NewItems items;
    std::vector<Key> keys;
  };
  struct Sample {
    std::size_t count = 0;
    Picks picks;
  };

  void advance();
  bool advance_inserts();
  bool advance_samples();
  void insert_next(Insert& insert);
  void place(Slot slot, double priority);
  void pick(Sample& sample, std::size_t count);
  void add_pick(Sample& sample, const Choice& choice);
  void remove_slot(Slot slot);
  void reuse(Slot slot);
  std::optional<Slot> find(Key key) const;
  Key key_of(Slot slot) const {
    return static_cast<Key>(items_[slot].generation) << 32 | static_cast<Key>(slot);
  }

  TableOptions options_;
  Random random_;
  Limiter limiter_;
  std::unique_ptr<Selector> sampler_;
  std::unique_ptr<Selector> remover_;
  Rows* rows_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t insertions_ = 0;
  std::vector<Item> items_;  // by slot
  std::vector<Slot> free_;
  Request last_request_ = 0;
  std::map<Request, Insert> inserts_;
  std::map<Request, Sample> samples_;
  std::deque<Request> insert_line_, sample_line_;
  std::vector<Request> ended_;
  std::vector<Choice> choices_;
};

}  // namespace moolink::replay
