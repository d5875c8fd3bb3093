#include "replay/table.h"

#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "replay/rows.h"

using moolink::ErrorCode;
using moolink::replay::ItemState;
using moolink::replay::Key;
using moolink::replay::kLastGeneration;
using moolink::replay::NewItems;
using moolink::replay::Picks;
using moolink::replay::Request;
using moolink::replay::Row;
using moolink::replay::Rows;
using moolink::replay::SelectorKind;
using moolink::replay::SelectorOptions;
using moolink::replay::Table;
using moolink::replay::TableOptions;
using moolink::replay::TableState;

namespace {

TableOptions options(std::uint64_t max_size) {
  TableOptions made;
  made.sampler = {SelectorKind::fifo};
  made.remover = SelectorOptions{SelectorKind::fifo};
  made.max_size = max_size;
  return made;
}

// A table with its rows, whose items have one row each.
struct Fixture {
  Rows rows;
  Table table;

  explicit Fixture(const TableOptions& of, std::uint64_t seed = 1) : table(of, seed) {
    table.set_rows(rows);
  }

  Request insert(std::vector<double> priorities) {
    NewItems items;
    items.width = 1;
    items.rows.resize(priorities.size());
    rows.take(items.rows);
    items.priorities = std::move(priorities);
    return table.insert(std::move(items));
  }
  std::vector<Key> inserted(std::vector<double> priorities) {
    return table.take_inserted(insert(std::move(priorities)));
  }
};

}  // namespace

TEST("a full table removes by its remover, and the removed item's row is used again") {
  Fixture f(options(2));
  const std::vector<Key> keys = f.inserted({1, 1, 1});
  CHECK_EQ(f.table.size(), 2U);
  CHECK_EQ(f.rows.used(), 2U);
  CHECK_EQ(f.table.counts().deletes, 1);
  const std::vector<double> priorities = {5, 5, 5};
  CHECK_EQ(f.table.update(keys, priorities), 2U);  // the first is gone
}

TEST("a full table without a remover keeps inserts waiting until samples have made room") {
  TableOptions of = options(2);
  of.remover.reset();
  of.max_times_sampled = 1;
  Fixture f(of);
  const Request waiting = f.insert({1, 1, 1});
  CHECK_EQ(f.table.waiting_inserts(), 1U);
  CHECK(f.table.take_ended().empty());
  const Request sample = f.table.sample(1);
  CHECK((f.table.take_ended() == std::vector<Request>{sample, waiting}));
  CHECK_EQ(f.table.take_inserted(waiting).size(), 3U);
  Picks picks = f.table.take_sampled(sample);
  CHECK_EQ(picks.keys.size(), 1U);
  CHECK_EQ(f.rows.used(), 3U);  // two items, and the one that is being read
  f.rows.release(picks.rows);
  CHECK_EQ(f.rows.used(), 2U);
}

TEST("who stops waiting gets the part of its batch that there was") {
  TableOptions of = options(10);
  of.limiter = {1, 1, 0, 10};
  Fixture f(of);
  f.inserted({1, 2, 3});
  const Request request = f.table.sample(5);
  CHECK_EQ(f.table.waiting_samples(), 1U);
  const Picks picks = f.table.take_sampled(request);
  CHECK_EQ(picks.keys.size(), 3U);
  CHECK_EQ(f.table.waiting_samples(), 0U);
  CHECK_EQ(f.table.counts().samples, 3);
}

TEST("a restored table goes on where it was: keys, counts; and what it chooses is decided") {
  TableOptions of = options(50);
  of.sampler = {SelectorKind::prioritized, 0.6};
  of.limiter = {4, 5, 0, 1000};
  Fixture f(of);
  std::vector<Key> keys;
  for (int i = 0; i < 70; ++i) keys.push_back(f.inserted({1.0 + i % 7}).front());
  f.rows.release(f.table.take_sampled(f.table.sample(20)).rows);
  const auto restore = [&f](Table& table) {
    table.set_rows(f.rows);
    for (const ItemState& item : f.table.state().items) f.rows.retain(item.rows);
    table.restore(f.table.state());
  };
  Table restored(of, 99);
  Table other(of, 100);
  restore(restored);
  restore(other);
  CHECK(restored.counts() == f.table.counts());
  const Picks expected = other.take_sampled(other.sample(30));
  const Picks picks = restored.take_sampled(restored.sample(30));
  CHECK(picks.keys == expected.keys);
  CHECK(picks.probabilities == expected.probabilities);
  CHECK(picks.times_sampled == expected.times_sampled);
  CHECK_EQ(restored.remove(keys), 50U);
}

TEST("keys do not repeat and are not negative, however many items a slot has had") {
  Fixture f(options(1));
  TableState state;
  state.generations = {kLastGeneration - 1, kLastGeneration, 0x80000000};
  f.table.restore(std::move(state));
  std::set<Key> keys;
  for (int i = 0; i < 4; ++i) {
    const Key key = f.inserted({1}).front();
    CHECK(key >= 0);
    CHECK(keys.insert(key).second);
    CHECK_EQ(f.table.remove(std::vector{key}), 1U);
  }
  Table again(options(1), 1);
  again.set_rows(f.rows);
  again.restore(f.table.state());
  CHECK_EQ(again.state().generations[0], kLastGeneration);
  CHECK_EQ(again.state().generations[3], 3U);
}

TEST("priorities that no item can have change nothing") {
  TableOptions of = options(5);
  of.sampler = {SelectorKind::prioritized, 3};
  Fixture f(of);
  const std::vector<Key> keys = f.inserted({1, 2});
  for (const double wrong : {-1.0, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity(), 1e100}) {
    const std::vector<double> priorities = {7, wrong};
    CHECK_THROWS(f.table.update(keys, priorities), ErrorCode::invalid_argument);
  }
  CHECK_EQ(f.table.state().items[0].priority, 1.0);
}

TEST("reset removes all and counts anew") {
  Fixture f(options(5));
  f.inserted({1, 2});
  f.rows.release(f.table.take_sampled(f.table.sample(2)).rows);
  f.table.reset();
  CHECK_EQ(f.table.size(), 0U);
  CHECK_EQ(f.rows.used(), 0U);
  CHECK_EQ(f.table.counts().inserts, 0);
  CHECK_EQ(f.table.counts().samples, 0);
}
