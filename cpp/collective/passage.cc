#include "collective/passage.h"

#include <algorithm>

#include "base/round_up.h"

namespace moolink::collective {
namespace {

constexpr std::uint64_t kFewChunks = 4;
constexpr std::uint64_t kShortestChunk = std::uint64_t{64} << 10;

std::uint64_t line_of(std::uint64_t item_size) {  // elements
  return std::max<std::uint64_t>(1, kCacheLine / item_size);
}

// Adjacent blocks in a window.
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
  // Equally long, apart from the rounding.
  const std::uint64_t wanted = std::min(most, round_up(few, line));
  const std::uint64_t chunks = std::max<std::uint64_t>(1, (passage.count + wanted - 1) / wanted);
  return std::min(most, std::max(line, round_up((passage.count + chunks - 1) / chunks, line)));
}

}  // namespace

std::vector<Range> even_slices(std::uint64_t count, std::size_t item_size, std::size_t owners) {
  if (owners == 0) return {};
  const std::uint64_t each = round_up((count + owners - 1) / owners, line_of(item_size));
  std::vector<Range> ranges(owners);
  std::uint64_t begin = 0;
  for (Range& range : ranges) {
    range.begin = begin;
    begin = std::min(count, begin + each);
    range.end = begin;
  }
  return ranges;
}

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
      return false;
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
  if (blocks_per_window(passage) == 1) return {0, block};
  return {to * block, (to + 1) * block};
}

Range placed_bytes(const Passage& passage, std::uint32_t from, std::uint32_t to) {
  if (!passes(passage, from, to)) return {};
  const std::uint64_t block = passage.count * passage.item_size;
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

namespace {

// The elements of each block that pass in one chunk, in bytes.
struct Part {
  std::uint64_t at = 0;  // in the block
  std::uint64_t bytes = 0;
  std::uint64_t block = 0;   // a whole one
  std::uint64_t stride = 0;  // of blocks in a window
};

// Each rank begins with another rank, so that not all read one window.
std::vector<std::uint32_t> others_of(std::uint32_t rank, std::uint32_t ranks) {
  std::vector<std::uint32_t> others;
  for (std::uint32_t i = 1; i < ranks; ++i) others.push_back((rank + i) % ranks);
  return others;
}

ChunkPlan plan_all_reduce(const Passage& passage, const Part& part, std::uint32_t rank) {
  const std::uint64_t item = passage.item_size;
  const std::uint32_t owners = passage.owners == 0 ? passage.ranks : passage.owners;
  std::vector<Range> parts = even_slices(part.bytes / item, item, owners);
  parts.resize(passage.ranks);
  const auto move_of = [&](std::uint32_t j) {
    const std::uint64_t begin = parts[j].begin * item;
    return Move{j, begin, part.at + begin, parts[j].count() * item};
  };
  ChunkPlan plan;
  for (const std::uint32_t j : others_of(rank, passage.ranks)) {
    const Move move = move_of(j);
    if (move.bytes == 0) continue;
    plan.puts.push_back(move);
    plan.takes.push_back(move);
  }
  plan.reduced = move_of(rank);
  plan.placed = plan.reduced.user;
  plan.passed_on = passage.ranks > 1;
  return plan;
}

// Blocks that pass as they do over messages. A window has a block for each receiver, or one for all
// of them.
ChunkPlan plan_blocks(const Passage& passage, const Part& part, std::uint32_t rank) {
  const bool many = blocks_per_window(passage) > 1;
  const auto window_of = [&](std::uint32_t to) { return many ? to * part.stride : 0; };
  const auto sent_to = [&](std::uint32_t to) {
    return sent_bytes(passage, rank, to).begin + part.at;
  };
  const auto placed_from = [&](std::uint32_t from) {
    return placed_bytes(passage, from, rank).begin + part.at;
  };
  ChunkPlan plan;
  for (const std::uint32_t j : others_of(rank, passage.ranks)) {
    if (passes(passage, rank, j) && (many || plan.puts.empty())) {
      plan.puts.push_back({many ? j : rank, window_of(j), sent_to(j), part.bytes});
    }
    if (passes(passage, j, rank) && !reduces(passage.kind)) {
      plan.takes.push_back({j, window_of(rank), placed_from(j), part.bytes});
    }
  }
  if (reduces(passage.kind)) {
    plan.reduced = {rank, window_of(rank), sent_to(rank), part.bytes};
    plan.placed = part.at;
  } else if (passes(passage, rank, rank)) {
    plan.own.push_back({rank, sent_to(rank), placed_from(rank), part.bytes});
  }
  return plan;
}

}  // namespace

std::uint64_t chunk_end(const Passage& passage, std::uint64_t window_bytes, std::uint64_t chunk) {
  const std::uint64_t each = chunk_elements(passage, window_bytes);
  return std::min(passage.count, (chunk + 1) * each) * passage.item_size;
}

ChunkPlan chunk_plan(const Passage& passage, std::uint64_t window_bytes, std::uint32_t rank,
                     std::uint64_t chunk) {
  const std::uint64_t item = passage.item_size;
  const std::uint64_t each = chunk_elements(passage, window_bytes);
  const std::uint64_t begin = std::min(passage.count, chunk * each);
  const std::uint64_t count = std::min(passage.count, begin + each) - begin;
  if (count == 0) return {};
  const Part part{begin * item, count * item, passage.count * item, each * item};
  return passage.kind == Kind::all_reduce ? plan_all_reduce(passage, part, rank)
                                          : plan_blocks(passage, part, rank);
}

}  // namespace moolink::collective
