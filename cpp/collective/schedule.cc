#include "collective/schedule.h"

#include <algorithm>
#include <bit>

namespace moolink::collective {
namespace {

using StepKind = Step::Kind;

// The cost model: a step costs a latency, in which a link could carry kLatencyBytes, and its bytes.
// To add a byte costs kAddingCost times as much as to send it.
constexpr double kLatencyBytes = 64 << 10;
constexpr double kAddingCost = 0.3;
// With more members, the messages at the root of a star cost more than the steps of doubling.
constexpr std::uint32_t kMostInStar = 8;

constexpr std::uint64_t kChainsOfHost = 8;
constexpr std::uint64_t kLeastChainBytes = std::uint64_t{128} << 10;
constexpr std::uint64_t kMostChainBytes = std::uint64_t{1} << 20;

std::uint64_t quotient(std::uint64_t dividend, std::uint64_t divisor) {  // rounded up
  return (dividend + divisor - 1) / divisor;
}

}  // namespace

Schedule schedule_for(std::uint64_t bytes, std::uint32_t hosts, bool compressed, bool beside) {
  // Doubling: log2 steps with all bytes. Trees: twice the steps, with 2 (n - 1) / n of the bytes.
  const double steps = std::bit_width(hosts - 1);
  const double share = 1 - 1.0 / hosts;
  const double more = steps * (1 + kAddingCost) - share * (2 + kAddingCost);
  const double most = compressed || hosts < 2 ? kLatencyBytes : kLatencyBytes * steps / more;
  if (static_cast<double>(bytes) > most) return Schedule::tree;
  return beside && hosts > 2 && hosts <= kMostInStar ? Schedule::star : Schedule::doubling;
}

std::vector<Step> steps_of(Schedule schedule, std::uint32_t hosts, std::uint32_t host,
                           std::uint32_t root) {
  switch (schedule) {
    case Schedule::star:
      return star(hosts, host);
    case Schedule::doubling:
      return doubling(hosts, host);
    case Schedule::tree:
      return tree(hosts, host, root);
  }
  return {};
}

std::vector<Range> chain_ranges(std::uint64_t count, std::size_t item_size, std::uint32_t hosts) {
  const std::uint64_t share = quotient(count * item_size, hosts);
  const std::uint64_t bytes = std::clamp(share / kChainsOfHost, kLeastChainBytes, kMostChainBytes);
  std::vector<Range> ranges = even_slices(count, item_size, quotient(share, bytes) * hosts);
  std::erase_if(ranges, [](const Range& range) { return range.empty(); });
  return ranges;
}

std::vector<Step> tree(std::uint32_t hosts, std::uint32_t host, std::uint32_t root) {
  const auto rounds = static_cast<std::uint32_t>(std::bit_width(hosts - 1));
  const std::uint32_t place = (host + hosts - root) % hosts;  // the root's is 0
  const auto host_of = [&](std::uint32_t other) { return (other + root) % hosts; };
  // A place's parent lacks its lowest set bit. A child has one more bit below that one.
  const auto children =
      std::min(rounds, place == 0 ? rounds : static_cast<std::uint32_t>(std::countr_zero(place)));
  std::vector<Step> steps;
  for (std::uint32_t round = 0; round < children; ++round) {
    const std::uint32_t child = place + (1u << round);
    if (child < hosts) steps.push_back({StepKind::reduce, host_of(child), round, false});
  }
  if (place == 0) {
    steps.push_back({StepKind::finish, 0, 0, false});
  } else {
    const std::uint32_t parent = host_of(place - (1u << children));
    steps.push_back({StepKind::send, parent, children, false});
    steps.push_back({StepKind::store, parent, rounds + children, false});
  }
  for (std::uint32_t round = children; round-- > 0;) {  // the largest subtree first
    const std::uint32_t child = place + (1u << round);
    if (child < hosts) steps.push_back({StepKind::send, host_of(child), rounds + round, false});
  }
  return steps;
}

std::vector<Step> star(std::uint32_t hosts, std::uint32_t host) {
  if (host != 0) return {{StepKind::send, 0, host, false}, {StepKind::store, 0, hosts, false}};
  std::vector<Step> steps;
  for (std::uint32_t other = 1; other < hosts; ++other) {
    steps.push_back({StepKind::reduce, other, other, false});
  }
  steps.push_back({StepKind::finish, 0, 0, false});
  for (std::uint32_t other = 1; other < hosts; ++other) {
    steps.push_back({StepKind::send, other, hosts, false});
  }
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

bool sends_result(const std::vector<Step>& steps) { return steps.back().kind == StepKind::send; }

}  // namespace moolink::collective
