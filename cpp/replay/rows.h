#pragma once

#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <vector>

namespace moolink::replay {

// A stored step: the same row of all arrays of its store.
using Row = std::uint32_t;

// Counts the references to each row: items of tables, writers that may still make items of it, and
// batches being copied. A row without references is free, and is reused.
class Rows {
 public:
  // Rows with one reference each, held by the caller. The warmest come first.
  void take(std::span<Row> rows) {
    for (Row& row : rows) {
      if (free_.empty()) {
        if (references_.size() > std::numeric_limits<Row>::max()) throw std::bad_alloc();
        row = static_cast<Row>(references_.size());
        // With room for all rows, release() allocates nothing.
        if (free_.capacity() <= row) free_.reserve(2 * std::size_t{row} + 1);
        references_.push_back(1);
        continue;
      }
      row = free_.back();
      free_.pop_back();
      references_[row] = 1;
    }
  }
  void retain(std::span<const Row> rows) {
    for (const Row row : rows) ++references_[row];
  }
  // Drops a reference of each; a row that is named twice loses two.
  void release(std::span<const Row> rows) {
    for (const Row row : rows) {
      if (--references_[row] == 0) free_.push_back(row);
    }
  }

  std::uint32_t references(Row row) const { return references_[row]; }
  std::size_t rows() const { return references_.size(); }  // ever used
  std::size_t used() const { return references_.size() - free_.size(); }

 private:
  std::vector<std::uint32_t> references_;
  std::vector<Row> free_;
};

}  // namespace moolink::replay
