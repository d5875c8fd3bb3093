#include "collective/schedule.h"

#include <algorithm>
#include <bit>

namespace moolink::collective {
namespace {

using StepKind = Step::Kind;

constexpr std::uint64_t kChainsOfHost = 8;
constexpr std::uint64_t kLeastChainBytes = std::uint64_t{128} << 10;
constexpr std::uint64_t kMostChainBytes = std::uint64_t{1} << 20;

std::uint64_t quotient(std::uint64_t dividend, std::uint64_t divisor) {  // rounded up
  return (dividend + divisor - 1) / divisor;
}

}  // namespace

bool is_small(std::uint64_t count, std::size_t item_size) {
  return count * item_size <= kSmallExchange;
}

std::vector<Range> chain_ranges(std::uint64_t count, std::size_t item_size, std::uint32_t hosts) {
  if (is_small(count, item_size)) return {{0, count}};
  const std::uint64_t share = quotient(count * item_size, hosts);
  const std::uint64_t bytes = std::clamp(share / kChainsOfHost, kLeastChainBytes, kMostChainBytes);
  std::vector<Range> ranges = even_slices(count, item_size, quotient(share, bytes) * hosts);
  std::erase_if(ranges, [](const Range& range) { return range.empty(); });
  return ranges;
}

std::vector<Step> ring(std::uint32_t hosts, std::uint32_t host, std::uint32_t last) {
  const std::uint32_t next = (host + 1) % hosts;
  const std::uint32_t previous = (host + hosts - 1) % hosts;
  const std::uint32_t hop = (host + hosts - last - 1) % hosts;  // of the sum when it is here
  const std::uint32_t result_hop = (host + hosts - last) % hosts;
  std::vector<Step> steps;
  if (hop > 0) steps.push_back({StepKind::reduce, previous, hop - 1, true});
  if (host == last) {
    steps.push_back({StepKind::finish, 0, 0, false});
  } else {
    steps.push_back({StepKind::send, next, hop, false});
    steps.push_back({StepKind::store, previous, hosts - 2 + result_hop, false});
  }
  if (next != last) steps.push_back({StepKind::send, next, hosts - 1 + result_hop, false});
  return steps;
}

std::vector<Step> doubling(std::uint32_t hosts, std::uint32_t host) {
  const std::uint32_t core = std::bit_floor(hosts);
  const std::uint32_t folded = hosts - core;  // of the first 2 * folded hosts every second one
  const auto host_of = [folded](std::uint32_t place) {
    return place < folded ? 2 * place : place + folded;
  };
  const std::uint32_t last_round = static_cast<std::uint32_t>(std::bit_width(core));
  if (host < 2 * folded && host % 2 == 1) {
    return {{StepKind::send, host - 1, 0, false}, {StepKind::store, host - 1, last_round, false}};
  }
  std::vector<Step> steps;
  const bool has_folded = host < 2 * folded;
  const std::uint32_t place = has_folded ? host / 2 : host - folded;
  if (has_folded) steps.push_back({StepKind::reduce, host + 1, 0, false});
  std::uint32_t round = 1;
  for (std::uint32_t distance = 1; distance < core; distance *= 2, ++round) {
    const std::uint32_t other = place ^ distance;
    steps.push_back({StepKind::send, host_of(other), round, false});
    steps.push_back({StepKind::reduce, host_of(other), round, other < place});
  }
  steps.push_back({StepKind::finish, 0, 0, false});
  if (has_folded) steps.push_back({StepKind::send, host + 1, last_round, false});
  return steps;
}

}  // namespace moolink::collective
