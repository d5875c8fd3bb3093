#pragma once

#include <cstdint>
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
  void take(std::span<Row> rows);
  void retain(std::span<const Row> rows);
  // Drops a reference of each; a row that is named twice loses two.
  void release(std::span<const Row> rows);

  std::uint32_t references(Row row) const { return references_[row]; }
  std::size_t rows() const { return references_.size(); }  // ever used
  std::size_t used() const { return references_.size() - free_.size(); }

 private:
  std::vector<std::uint32_t> references_;
  std::vector<Row> free_;
};

}  // namespace moolink::replay
