#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/passage.h"

namespace moolink::collective {

// Schedules of an exchange between hosts: pure functions of the number of hosts, the host and the
// size. Hosts are numbered from 0.
//
// A chain is a range of elements with the steps of each host. A chain's steps run in order; chains
// run in any order and at the same time. A chain and a round name a message: in a round a chain has
// at most one message from one host to another.
struct Step {
  enum class Kind : std::uint8_t {
    send,    // the value, to `peer`
    reduce,  // the value becomes the sum of the value and that of `peer`
    finish,  // the value is the sum of all hosts: it becomes the result
    store,   // the value of `peer` is the result, and becomes the value
  };
  Kind kind = Kind::send;
  std::uint32_t peer = 0;     // of send, reduce and store
  std::uint32_t round = 0;    // the same
  bool theirs_first = false;  // of reduce: the order of the two operands

  bool operator==(const Step&) const = default;
};

// The numbers of steps and messages determine the cost of a small payload; the bytes and the
// overlap of sending and arithmetic determine that of a large one.
enum class Schedule : std::uint8_t { star, doubling, tree };

// The schedule with the lowest cost by a model of latency and bandwidth. It depends only on what
// all hosts know, so they choose alike. docs/design/protocol/hosts.md has the measurements. A
// compressed payload above 64 KB goes along trees. `beside`: the "hosts" are members of one host.
Schedule schedule_for(std::uint64_t bytes, std::uint32_t hosts, bool compressed, bool beside);

// A host's steps in a chain.
std::vector<Step> steps_of(Schedule schedule, std::uint32_t hosts, std::uint32_t host,
                           std::uint32_t root);

// The chains along trees of a payload that each host has as a whole. Each host is the root of as
// many. They are small enough that sending, arithmetic and receiving overlap, and large enough that
// a message's fixed cost is negligible.
std::vector<Range> chain_ranges(std::uint64_t count, std::size_t item_size, std::uint32_t hosts);

// Reduce-scatter and all-gather along binomial trees: the values of a chain go up a tree whose root
// is `root`, which finishes the sum, and the result goes down the same tree: 2 log2(hosts) rounds,
// rounded up. If chains have each host as their root in turn, a host sends 2 (hosts - 1) / hosts of
// the bytes, the minimum, in as many messages as in a ring, which takes 2 (hosts - 1) rounds. (If
// the number of hosts is a power of two, they send the data of recursive halving and doubling, one
// chain in a message: R. Rabenseifner, "Optimization of Collective Reduction Operations", 2004.)
std::vector<Step> tree(std::uint32_t hosts, std::uint32_t host, std::uint32_t root);

// All send to host 0, which reduces in the order of hosts and sends the result to all: two steps,
// and the fewest messages.
std::vector<Step> star(std::uint32_t hosts, std::uint32_t host);

// Recursive doubling: each host exchanges all elements with log2(hosts) others. Beyond a power of
// two, every second of the first hosts sends its elements to its neighbour before and gets the
// result afterwards. All hosts evaluate the same expression, so the bits are the same except those
// of NaN, whose payload depends on the processor's operand order.
std::vector<Step> doubling(std::uint32_t hosts, std::uint32_t host);

// Whether the host sends the result on: others may read it after the host has ended.
bool sends_result(const std::vector<Step>& steps);

}  // namespace moolink::collective
