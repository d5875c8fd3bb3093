#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/round_up.h"
#include "replay/rows.h"
#include "tensor/dtype.h"
#include "tensor/layout.h"

namespace moolink::runtime {

// One array for each step.
struct ReplayColumn {
  std::string name;  // for people
  tensor::DType dtype = tensor::DType::uint8;
  tensor::Shape shape;
  std::size_t bytes = 0;  // of one row
};

// An array of an item: a column's elements in `count` of the item's rows; if `count` is 0, in one.
struct ReplayPiece {
  std::uint32_t column = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;

  std::uint32_t rows() const { return count == 0 ? 1 : count; }
};

// How an item's arrays are composed of its rows.
struct ReplayPattern {
  std::uint32_t store = 0;
  std::uint32_t width = 0;  // rows of an item
  std::vector<ReplayPiece> pieces;
};

// The memory of rows: blocks of many rows, column by column. Blocks do not move. Changes to the
// counts, and growth, happen under the owner's lock; the holder of a reference to a row copies it
// without the lock.
class ReplayStore {
 public:
  static constexpr std::size_t kBlockBytes = std::size_t{64} << 20;

  // `memory` provides the blocks, and outlives the store.
  ReplayStore(std::vector<ReplayColumn> columns, Allocator& memory)
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

  const std::vector<ReplayColumn>& columns() const { return columns_; }
  replay::Rows& rows() { return rows_; }
  const replay::Rows& rows() const { return rows_; }
  std::size_t bytes() const { return blocks_->size() * block_bytes_; }  // taken from `memory`
  std::size_t row_bytes() const {
    std::size_t bytes = 0;
    for (const ReplayColumn& column : columns_) bytes += column.bytes;
    return bytes;
  }

  // Rows with memory; the caller holds a reference to each.
  std::vector<replay::Row> take(std::size_t count) {
    std::vector<replay::Row> rows(count);
    while ((blocks_->size() << shift_) < rows_.used() + count) {
      auto blocks = std::make_shared<View::Blocks>(*blocks_);
      blocks->push_back(memory_.allocate(block_bytes_));
      blocks_ = std::move(blocks);
    }
    rows_.take(rows);
    return rows;
  }

  // The places of rows; it stays valid while other threads take rows.
  class View {
   public:
    std::byte* at(replay::Row row, std::uint32_t column) const {
      const std::size_t in_block = row & ((std::size_t{1} << store_->shift_) - 1);
      return (*blocks_)[row >> store_->shift_].data() + store_->offsets_[column] +
             in_block * store_->columns_[column].bytes;
    }

   private:
    friend class ReplayStore;
    using Blocks = std::vector<MutableBuffer>;

    View(const ReplayStore& store, std::shared_ptr<const Blocks> blocks)
        : store_(&store), blocks_(std::move(blocks)) {}

    const ReplayStore* store_;
    std::shared_ptr<const Blocks> blocks_;
  };
  View view() const { return {*this, blocks_}; }

 private:
  std::vector<ReplayColumn> columns_;
  Allocator& memory_;
  replay::Rows rows_;
  std::vector<std::size_t> offsets_;  // of the columns in a block
  std::size_t shift_ = 0;             // a block has 1 << shift_ rows
  std::size_t block_bytes_ = 0;
  std::shared_ptr<const View::Blocks> blocks_ = std::make_shared<View::Blocks>();
};

}  // namespace moolink::runtime
