#include "collective/plan.h"

#include <algorithm>

namespace moolink::collective {
namespace {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kFewChunks = 4;
constexpr std::uint64_t kShortestChunk = std::uint64_t{64} << 10;

std::uint64_t line_of(std::uint64_t item_size) {  // elements
  return std::max<std::uint64_t>(1, kLine / item_size);
}

std::uint64_t round_up(std::uint64_t count, std::uint64_t unit) {
  return (count + unit - 1) / unit * unit;
}

std::vector<Range> cut(std::uint64_t count, std::uint64_t each, std::size_t owners) {
  std::vector<Range> ranges(owners);
  std::uint64_t begin = 0;
  for (Range& range : ranges) {
    range.begin = begin;
    begin = std::min(count, begin + each);
    range.end = begin;
  }
  return ranges;
}

// Blocks that lie side by side in a window.
std::uint64_t blocks_per_window(const Passage& passage) {
  const bool many = passage.kind == Kind::reduce_scatter || passage.kind == Kind::scatter;
  return many ? passage.ranks : 1;
}

// Elements of a block in each chunk but the last.
std::uint64_t chunk_elements(const Passage& passage, std::uint64_t window_bytes) {
  const std::uint64_t line = line_of(passage.item_size);
  const std::uint64_t blocks = blocks_per_window(passage);
  const std::uint64_t most =
      std::max(line, window_bytes / (passage.item_size * blocks) / line * line);
  const std::uint64_t shortest =
      std::max<std::uint64_t>(1, kShortestChunk / (passage.item_size * blocks));
  const std::uint64_t few = std::max(shortest, (passage.count + kFewChunks - 1) / kFewChunks);
  // Equally long ones, but for the rounding.
  const std::uint64_t wanted = std::min(most, round_up(few, line));
  const std::uint64_t chunks = std::max<std::uint64_t>(1, (passage.count + wanted - 1) / wanted);
  return std::min(most, std::max(line, round_up((passage.count + chunks - 1) / chunks, line)));
}

}  // namespace

std::vector<Range> even_slices(std::uint64_t count, std::size_t item_size, std::size_t owners) {
  if (owners == 0) return {};
  return cut(count, round_up((count + owners - 1) / owners, line_of(item_size)), owners);
}

std::vector<Range> slices(std::uint64_t count, std::size_t item_size, std::size_t owners) {
  if (count <= kSmallBytes / item_size) return cut(count, count, owners);
  return even_slices(count, item_size, owners);
}

const char* kind_text(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::all_gather:
      return "all_gather";
    case Kind::broadcast:
      return "broadcast";
    case Kind::gather:
      return "gather";
    case Kind::scatter:
      return "scatter";
  }
  return "?";
}

std::string kind_name(Kind kind) { return kind_text(kind); }

std::uint64_t input_bytes(const Passage& passage, std::uint32_t rank) {
  const std::uint64_t block = passage.count * passage.item_size;
  switch (passage.kind) {
    case Kind::all_reduce:
    case Kind::all_gather:
    case Kind::gather:
      return block;
    case Kind::reduce_scatter:
      return block * passage.ranks;
    case Kind::broadcast:
      return rank == passage.root ? block : 0;
    case Kind::scatter:
      return rank == passage.root ? block * passage.ranks : 0;
  }
  return 0;
}

std::uint64_t output_bytes(const Passage& passage, std::uint32_t rank) {
  const std::uint64_t block = passage.count * passage.item_size;
  if (passage.kind == Kind::all_gather) return block * passage.ranks;
  if (passage.kind == Kind::gather) return rank == passage.root ? block * passage.ranks : 0;
  return block;
}

// --- over messages

bool passes(const Passage& passage, std::uint32_t from, std::uint32_t to) {
  switch (passage.kind) {
    case Kind::all_reduce:
    case Kind::reduce_scatter:
    case Kind::all_gather:
      return true;
    case Kind::broadcast:
    case Kind::scatter:
      return from == passage.root;
    case Kind::gather:
      return to == passage.root;
  }
  return false;
}

Range sent_bytes(const Passage& passage, std::uint32_t from, std::uint32_t to) {
  if (!passes(passage, from, to)) return {};
  const std::uint64_t block = passage.count * passage.item_size;
  if (passage.kind == Kind::all_reduce) {
    const Range slice = slices(passage.count, passage.item_size, passage.ranks)[to];
    return {slice.begin * passage.item_size, slice.end * passage.item_size};
  }
  if (blocks_per_window(passage) == 1) return {0, block};
  return {to * block, (to + 1) * block};
}

Range placed_bytes(const Passage& passage, std::uint32_t from, std::uint32_t to) {
  if (!passes(passage, from, to)) return {};
  const std::uint64_t block = passage.count * passage.item_size;
  if (passage.kind == Kind::all_reduce) return sent_bytes(passage, from, to);
  if (passage.kind == Kind::all_gather || passage.kind == Kind::gather) {
    return {from * block, (from + 1) * block};
  }
  return {0, block};
}

// --- through windows

std::uint64_t chunks_of(const Passage& passage, std::uint64_t window_bytes) {
  const std::uint64_t each = chunk_elements(passage, window_bytes);
  return std::max<std::uint64_t>(1, (passage.count + each - 1) / each);
}

ChunkPlan chunk_plan(const Passage& passage, std::uint64_t window_bytes, std::uint32_t rank,
                     std::uint64_t chunk) {
  const std::uint64_t item = passage.item_size;
  const std::uint64_t each = chunk_elements(passage, window_bytes);
  const std::uint64_t begin = std::min(passage.count, chunk * each);
  const std::uint64_t count = std::min(passage.count, begin + each) - begin;
  const std::uint64_t at = begin * item;
  const std::uint64_t bytes = count * item;
  const std::uint64_t block = passage.count * item;
  const std::uint64_t stride = each * item;  // of blocks in a window
  ChunkPlan plan;
  if (passage.kind == Kind::all_reduce) {
    const std::vector<Range> parts = even_slices(count, item, passage.ranks);
    for (std::uint32_t i = 1; i <= passage.ranks; ++i) {
      const std::uint32_t j = (rank + i) % passage.ranks;  // everybody begins with another one
      const Move move{j, parts[j].begin * item, at + parts[j].begin * item,
                      parts[j].count() * item};
      if (j == rank) {
        plan.reduced = move;
      } else if (move.bytes != 0) {
        plan.puts.push_back(move);
        plan.takes.push_back(move);
      }
    }
    plan.placed = plan.reduced.user;
    plan.passed_on = true;
    return plan;
  }
  if (bytes == 0) return plan;
  const bool root = rank == passage.root;
  for (std::uint32_t i = 1; i <= passage.ranks; ++i) {
    const std::uint32_t j = (rank + i) % passage.ranks;
    switch (passage.kind) {
      case Kind::all_reduce:
        break;
      case Kind::reduce_scatter: {
        const Move move{j, j * stride, j * block + at, bytes};
        if (j == rank) {
          plan.reduced = move;
          plan.placed = at;
        } else {
          plan.puts.push_back(move);
        }
        break;
      }
      case Kind::all_gather:
      case Kind::gather:
        if (passage.kind == Kind::gather && !root) break;
        if (j == rank) {
          plan.own.push_back({j, at, j * block + at, bytes});
        } else {
          plan.takes.push_back({j, 0, j * block + at, bytes});
        }
        break;
      case Kind::scatter:
        if (!root) break;
        if (j == rank) {
          plan.own.push_back({j, j * block + at, at, bytes});
        } else {
          plan.puts.push_back({j, j * stride, j * block + at, bytes});
        }
        break;
      case Kind::broadcast:
        break;
    }
  }
  const bool puts_block = passage.kind == Kind::all_gather ||
                          (passage.kind == Kind::gather && !root) ||
                          (passage.kind == Kind::broadcast && root);
  if (puts_block && passage.ranks > 1) plan.puts.push_back({rank, 0, at, bytes});
  if (passage.kind == Kind::broadcast) {
    if (root) {
      plan.own.push_back({rank, at, at, bytes});
    } else {
      plan.takes.push_back({passage.root, 0, at, bytes});
    }
  }
  if (passage.kind == Kind::scatter && !root) {
    plan.takes.push_back({passage.root, rank * stride, at, bytes});
  }
  return plan;
}

}  // namespace moolink::collective
