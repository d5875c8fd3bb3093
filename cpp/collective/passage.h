#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/enum_names.h"

namespace moolink::collective {

inline constexpr std::uint64_t kCacheLine = 64;

// Elements [begin, end) of a tensor.
struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t count() const { return end - begin; }
  bool empty() const { return begin == end; }
  bool operator==(const Range&) const = default;
};

// The elements that each of `owners` members reduces: contiguous ranges in the owners' order that
// cover all elements once. They are cut at multiples of a cache line, so that no two ranges share
// one.
std::vector<Range> even_slices(std::uint64_t count, std::size_t item_size, std::size_t owners);

// --- collectives. The numbers are part of the protocol.

enum class Kind : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  gather,
  scatter
};
constexpr Kind enum_max(Kind) { return Kind::scatter; }
inline constexpr auto kKindNames = enum_names<Kind::scatter>(
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter");
inline std::string kind_name(Kind kind) { return kKindNames[kind]; }
constexpr bool has_root(Kind kind) {
  return kind == Kind::broadcast || kind == Kind::gather || kind == Kind::scatter;
}
constexpr bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce_scatter;
}

// The data that one collective moves between `ranks` members. A block has `count` elements:
//                  input                    output
//   all_reduce     a block                  the block reduced over all ranks
//   reduce_scatter a block for each rank    this rank's block, reduced over all ranks
//   all_gather     a block                  the blocks of all ranks in their order
//   broadcast      the root's block         the root's block
//   gather         a block                  at the root: the blocks of all ranks in their order
//   scatter        the root's: a block for each rank     this rank's block
struct Passage {
  Kind kind = Kind::all_reduce;
  std::uint32_t root = 0;
  std::uint32_t ranks = 1;
  std::uint64_t item_size = 1;
  std::uint64_t count = 0;
  std::uint32_t owners = 0;  // of all_reduce through windows: the ranks below it reduce; 0: all

  bool operator==(const Passage&) const = default;
};

std::uint64_t input_bytes(const Passage& passage, std::uint32_t rank);
std::uint64_t output_bytes(const Passage& passage, std::uint32_t rank);

// --- over messages, of any kind but allreduce (exchange.h): the bytes that one rank's input sends
// to another, and their place there. An empty range: nothing passes between the two. For kinds that
// reduce, the place is in the data that the receiver reduces, where all pieces are equally long.
Range sent_bytes(const Passage& passage, std::uint32_t from, std::uint32_t to);
Range placed_bytes(const Passage& passage, std::uint32_t from, std::uint32_t to);
bool passes(const Passage& passage, std::uint32_t from, std::uint32_t to);

// --- through windows in shared memory, one for each rank, chunk by chunk.

// Of 64 KB to 2 MB, and 2 to 16 windows, this size was the fastest, or close to it, from 1 to 64 MB
// at 2 and 4 ranks.
inline constexpr std::uint64_t kWindowBytes = std::uint64_t{512} << 10;

// Bytes copied between a rank's own memory and the window of `rank`.
struct Move {
  std::uint32_t rank = 0;
  std::uint64_t window = 0;
  std::uint64_t user = 0;
  std::uint64_t bytes = 0;

  bool operator==(const Move&) const = default;
};

// One rank's actions on one chunk, in this order.
struct ChunkPlan {
  std::vector<Move> puts;    // from the input into the own window
  Move reduced;              // the own slice: the same place of every window, `user` in the input
  std::uint64_t placed = 0;  // its place in the output
  bool passed_on = false;    // it is also put into the own window, for the others
  std::vector<Move> takes;   // from the windows into the output, once these ranks are ready
  std::vector<Move> own;     // the same within own memory: `window` is the place in the input
};

// At least one, so that an empty collective passes through too. Chunks are shorter than a window
// allows if there would be few, so that ranks work on different ones at a time.
std::uint64_t chunks_of(const Passage& passage, std::uint64_t window_bytes);
// The end of a chunk's part of a block, in bytes.
std::uint64_t chunk_end(const Passage& passage, std::uint64_t window_bytes, std::uint64_t chunk);
ChunkPlan chunk_plan(const Passage& passage, std::uint64_t window_bytes, std::uint32_t rank,
                     std::uint64_t chunk);

}  // namespace moolink::collective
