#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/plan.h"

namespace moolink::collective {

// How hosts combine the results of their own members: pure functions of the number of hosts and the
// size. Hosts are numbered from 0, in the order of their lowest ranks.
//
// A schedule is a list of chains, one for each range of elements. A chain's steps run in order;
// chains run in any order and at the same time. Every host has the same chains with its own steps.
// A chain and a round name a message: in a round a chain has at most one message from one host to
// another.
struct Step {
  enum class Kind : std::uint8_t {
    send,    // the value, to `peer`
    reduce,  // the value becomes the sum of the value and what `peer` sent
    finish,  // the value is the sum of all hosts: it becomes the result
    store,   // what `peer` sent is the result, and the value
  };
  Kind kind = Kind::send;
  std::uint32_t peer = 0;     // of send, reduce and store
  std::uint32_t round = 0;    // the same
  bool theirs_first = false;  // of reduce: the order of the two operands

  bool operator==(const Step&) const = default;
};

struct Chain {
  std::uint32_t id = 0;  // its index in the order common to all hosts
  Range range;
  std::vector<Step> steps;

  bool operator==(const Chain&) const = default;
};

struct Schedule {
  // Whether several hosts compute the same elements. All evaluate the same expression, so the bits
  // are the same except those of NaN, whose payload depends on the processor's operand order.
  bool computed_by_many = false;
  std::vector<Chain> chains;  // in the order in which this host needs its own elements
};

// Latency dominates for payloads up to this size.
inline constexpr std::size_t kSmallExchange = std::size_t{64} << 10;
// Approximate size of a chain of a large payload: small enough that sending, arithmetic and
// receiving overlap, large enough that a message's fixed cost is negligible.
inline constexpr std::size_t kSegmentBytes = std::size_t{1} << 20;

// The members of a host share its chains: `lanes` of them carry out one each in turn, the member of
// the same lane at every host, over a connection of their own. A block's successive segments have
// different lanes.
constexpr std::uint32_t lane_of(std::uint32_t chain, std::uint32_t hosts, std::uint32_t lanes) {
  return chain / hosts % lanes;
}

// Whether schedule() chooses doubling(). In a ring, a host that has the result knows that
// everything it sent of its own elements has arrived.
bool is_small(std::uint64_t count, std::size_t item_size);

// The steps of host `host` of `hosts` to reduce `count` elements; ring() or doubling() by the size.
// With one host: every chain is one finish.
Schedule schedule(std::uint64_t count, std::size_t item_size, std::uint32_t hosts,
                  std::uint32_t host, std::size_t segment_bytes = kSegmentBytes);

// Reduce-scatter and all-gather around a ring, each block in segments that follow one another: a
// host sends 2 (hosts - 1) / hosts of the bytes, the minimum. One host finishes each element's sum,
// which the others copy. Block j is summed in the order of hosts j + 1, j + 2, ..., j.
Schedule ring(std::uint64_t count, std::size_t item_size, std::uint32_t hosts, std::uint32_t host,
              std::size_t segment_bytes = kSegmentBytes);

// Recursive doubling: each host exchanges all elements with log2(hosts) others. Beyond a power of
// two, every second of the first hosts sends its elements to its neighbour before and gets the
// result afterwards.
Schedule doubling(std::uint64_t count, std::uint32_t hosts, std::uint32_t host);

}  // namespace moolink::collective
