#include "collective/schedule.h"

#include <algorithm>
#include <bit>

namespace moolink::collective {
namespace {

using StepKind = Step::Kind;

// Host `host`'s steps for a segment of block `block`. The partial sum starts at the host after the
// block's owner and goes around to the owner; then the result goes around once from there.
std::vector<Step> ring_steps(std::uint32_t hosts, std::uint32_t host, std::uint32_t block) {
  const std::uint32_t next = (host + 1) % hosts;
  const std::uint32_t previous = (host + hosts - 1) % hosts;
  const std::uint32_t hop = (host + hosts - block - 1) % hosts;  // of the sum when it is here
  const bool owner = host == block;
  std::vector<Step> steps;
  if (hop > 0) steps.push_back({StepKind::reduce, previous, hop - 1, true});
  if (owner) steps.push_back({StepKind::finish, 0, 0, false});
  if (!owner) {
    steps.push_back({StepKind::send, next, hop, false});
    const std::uint32_t result_hop = (host + hosts - block) % hosts;  // at least 1
    steps.push_back({StepKind::store, previous, hosts - 2 + result_hop, false});
  }
  if (next != block) {
    const std::uint32_t result_hop = (host + hosts - block) % hosts;
    steps.push_back({StepKind::send, next, hosts - 1 + result_hop, false});
  }
  return steps;
}

// Several for each block, so that some bytes are reduced while others travel; none so small that
// its messages cost more than that gains.
constexpr std::uint64_t kSegmentsOfBlock = 8;
constexpr std::uint64_t kLeastSegmentBytes = 128 << 10;

// Ranges of at most about `bytes`, aligned to cache lines from the block's begin.
std::vector<Range> segments(const Range& block, std::size_t item_size, std::size_t bytes) {
  const std::uint64_t wanted =
      std::max(kLeastSegmentBytes, block.count() * item_size / kSegmentsOfBlock);
  const std::uint64_t each =
      std::max<std::uint64_t>(64, std::min<std::uint64_t>(bytes, wanted) / item_size / 64 * 64);
  std::vector<Range> ranges;
  for (std::uint64_t at = block.begin; at < block.end; at += each) {
    ranges.push_back({at, std::min(block.end, at + each)});
  }
  return ranges;
}

}  // namespace

bool is_small(std::uint64_t count, std::size_t item_size) {
  return count * item_size <= kSmallExchange;
}

Schedule schedule(std::uint64_t count, std::size_t item_size, std::uint32_t hosts,
                  std::uint32_t host, std::size_t segment_bytes) {
  return is_small(count, item_size) ? doubling(count, hosts, host)
                                    : ring(count, item_size, hosts, host, segment_bytes);
}

Schedule ring(std::uint64_t count, std::size_t item_size, std::uint32_t hosts, std::uint32_t host,
              std::size_t segment_bytes) {
  std::vector<std::vector<Range>> blocks;
  std::size_t longest = 0;
  for (const Range& block : slices(count, item_size, hosts)) {
    blocks.push_back(segments(block, item_size, segment_bytes));
    longest = std::max(longest, blocks.back().size());
  }
  Schedule schedule;
  std::uint32_t first_id = 0;
  for (std::size_t segment = 0; segment < longest; ++segment) {
    // First the block whose sum starts here, then the blocks whose sums arrive after 1, 2, ...
    // hops.
    for (std::uint32_t hop = 0; hop < hosts; ++hop) {
      const std::uint32_t block = (host + 2 * hosts - 1 - hop) % hosts;
      if (segment >= blocks[block].size()) continue;
      std::uint32_t before = 0;  // blocks of a lower number that have this segment, too
      for (std::uint32_t i = 0; i < block; ++i) before += segment < blocks[i].size() ? 1 : 0;
      schedule.chains.push_back(
          {first_id + before, blocks[block][segment], ring_steps(hosts, host, block)});
    }
    for (const auto& block : blocks) first_id += segment < block.size() ? 1 : 0;
  }
  return schedule;
}

Schedule doubling(std::uint64_t count, std::uint32_t hosts, std::uint32_t host) {
  const std::uint32_t core = std::bit_floor(hosts);
  const std::uint32_t folded = hosts - core;  // of the first 2 * folded hosts every second one
  const auto host_of = [folded](std::uint32_t place) {
    return place < folded ? 2 * place : place + folded;
  };
  const std::uint32_t last_round = static_cast<std::uint32_t>(std::bit_width(core));
  Chain chain{0, {0, count}, {}};
  Schedule schedule{hosts > 1, {}};
  if (host < 2 * folded && host % 2 == 1) {
    chain.steps.push_back({StepKind::send, host - 1, 0, false});
    chain.steps.push_back({StepKind::store, host - 1, last_round, false});
    schedule.chains.push_back(std::move(chain));
    return schedule;
  }
  const bool has_folded = host < 2 * folded;
  const std::uint32_t place = has_folded ? host / 2 : host - folded;
  if (has_folded) chain.steps.push_back({StepKind::reduce, host + 1, 0, false});
  std::uint32_t round = 1;
  for (std::uint32_t distance = 1; distance < core; distance *= 2, ++round) {
    const std::uint32_t other = place ^ distance;
    chain.steps.push_back({StepKind::send, host_of(other), round, false});
    chain.steps.push_back({StepKind::reduce, host_of(other), round, other < place});
  }
  chain.steps.push_back({StepKind::finish, 0, 0, false});
  if (has_folded) chain.steps.push_back({StepKind::send, host + 1, last_round, false});
  schedule.chains.push_back(std::move(chain));
  return schedule;
}

}  // namespace moolink::collective
