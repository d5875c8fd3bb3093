#include "runtime/replay/replay_store.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/round_up.h"

namespace moolink::runtime {

ReplayStore::ReplayStore(std::vector<ReplayColumn> columns, Allocator& memory)
    : columns_(std::move(columns)), memory_(memory) {
  const std::size_t fitting = kBlockBytes / std::max<std::size_t>(row_bytes(), 1);
  shift_ = static_cast<std::size_t>(
      std::bit_width(std::clamp<std::size_t>(fitting, 1, std::size_t{1} << 20)) - 1);
  for (const ReplayColumn& column : columns_) {
    offsets_.push_back(block_bytes_);
    block_bytes_ += round_up(column.bytes << shift_, 64);
  }
  block_bytes_ = std::max<std::size_t>(block_bytes_, 64);
}

std::size_t ReplayStore::row_bytes() const {
  std::size_t bytes = 0;
  for (const ReplayColumn& column : columns_) bytes += column.bytes;
  return bytes;
}

std::vector<replay::Row> ReplayStore::take(std::size_t count) {
  std::vector<replay::Row> rows(count);
  while ((blocks_->size() << shift_) < rows_.used() + count) {
    auto blocks = std::make_shared<View::Blocks>(*blocks_);
    blocks->push_back(memory_.allocate(block_bytes_));
    blocks_ = std::move(blocks);
  }
  rows_.take(rows);
  return rows;
}

}  // namespace moolink::runtime
