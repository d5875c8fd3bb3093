#include "replay/rows.h"

#include <limits>
#include <new>

namespace moolink::replay {

void Rows::take(std::span<Row> rows) {
  for (Row& row : rows) {
    if (free_.empty()) {
      if (references_.size() > std::numeric_limits<Row>::max()) throw std::bad_alloc();
      row = static_cast<Row>(references_.size());
      references_.push_back(1);
      continue;
    }
    row = free_.back();
    free_.pop_back();
    references_[row] = 1;
  }
}

void Rows::retain(std::span<const Row> rows) {
  for (const Row row : rows) ++references_[row];
}

void Rows::release(std::span<const Row> rows) {
  for (const Row row : rows) {
    if (--references_[row] == 0) free_.push_back(row);
  }
}

}  // namespace moolink::replay
