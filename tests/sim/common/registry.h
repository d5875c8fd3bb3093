#pragma once

// The truth that the simulated learners are checked against: every contribution ever offered, and
// every history of rounds that a learner has applied.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "accumulate/machine.h"
#include "base/buffer.h"
#include "base/uid.h"

namespace moolink::sim {

using accumulate::Counters;
using Key = std::pair<Uid, std::uint64_t>;  // (instance, k)

class Registry {
 public:
  Registry(std::int64_t virtual_batch_size, std::size_t elements)
      : virtual_batch_size_(virtual_batch_size),
        largest_(virtual_batch_size),
        elements_(elements) {}

  std::size_t elements() const { return elements_; }
  // Of the leader whose it is greatest.
  std::int64_t largest_virtual_batch() const { return largest_; }
  // The leader of the epoch cuts its rounds by that size.
  void led(std::uint64_t epoch, std::int64_t virtual_batch_size);

  // A bucket of int64 elements that is zero but for one, which no other contribution has.
  Buffer make_bucket(const Uid& instance, std::uint64_t k) const;
  void offered(const Uid& instance, std::uint64_t k, std::int64_t batch, const Counters& counters);

  // Histories are a tree of rounds; a node is where somebody's parameters stand.
  std::uint64_t root(std::uint64_t version);
  // The round is applied at `node`. Requires that it is the next one, exact, the sum of what is in
  // it, and has nothing that this history has already (throws Violation). Returns the new node.
  std::uint64_t extend(std::uint64_t node, const accumulate::Round& round);
  std::uint64_t version(std::uint64_t node) const { return nodes_.at(node).version; }
  // Where two histories part: the version of the last node that leads to both.
  std::uint64_t parting(std::uint64_t a, std::uint64_t b) const;
  // How often the contribution is in the history that leads to the node.
  std::size_t times_in(std::uint64_t node, const Key& key) const;

  const std::set<std::uint64_t>& offers_of(const Uid& instance) const;
  std::int64_t batch_of(const Key& key) const { return contributions_.at(key).batch; }

 private:
  struct Contribution {
    std::int64_t batch = 0;
    Counters counters;
  };
  struct Node {
    std::uint64_t parent = 0;
    std::uint64_t version = 0;
    accumulate::RoundRecord record;
    std::vector<std::uint64_t> children;
  };

  void check(std::uint64_t node, const accumulate::Round& round) const;
  bool leads_to(std::uint64_t ancestor, std::uint64_t node) const;

  std::int64_t virtual_batch_size_;  // where no other is known of the epoch
  std::int64_t largest_;
  // Of each epoch; two histories may have an epoch of one number, each with a leader.
  std::map<std::uint64_t, std::set<std::int64_t>> led_by_;
  std::size_t elements_;
  std::map<Key, Contribution> contributions_;
  std::map<Uid, std::set<std::uint64_t>> by_instance_;
  std::map<std::uint64_t, Node> nodes_;
  std::uint64_t last_node_ = 0;
  std::map<Key, std::vector<std::uint64_t>> used_in_;  // nodes
};

}  // namespace moolink::sim
