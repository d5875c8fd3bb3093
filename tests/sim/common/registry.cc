#include "common/registry.h"

#include <algorithm>
#include <cstring>

#include "common/simulation.h"

namespace moolink::sim {
namespace {

std::string text(const Key& key) {
  return "(" + key.first.hex().substr(24) + ", " + std::to_string(key.second) + ")";
}

// The element that a contribution sets, and what it sets it to.
std::pair<std::size_t, std::int64_t> one_hot(const Key& key, std::size_t elements) {
  Random random(key.first.low ^ (key.second * 0x9e3779b97f4a7c15ULL));
  const auto element = static_cast<std::size_t>(random.below(elements));
  return {element, static_cast<std::int64_t>(random.next() >> 8)};
}

}  // namespace

Buffer Registry::make_bucket(const Uid& instance, std::uint64_t k) const {
  const MutableBuffer bucket = HeapAllocator().allocate(elements_ * sizeof(std::int64_t));
  std::memset(bucket.data(), 0, bucket.size());
  const auto [element, value] = one_hot({instance, k}, elements_);
  std::memcpy(bucket.data() + element * sizeof value, &value, sizeof value);
  return bucket;
}

void Registry::led(std::uint64_t epoch, std::int64_t virtual_batch_size) {
  led_by_[epoch].insert(virtual_batch_size);
  largest_ = std::max(largest_, virtual_batch_size);
}

void Registry::offered(const Uid& instance, std::uint64_t k, std::int64_t batch,
                       const Counters& counters) {
  require(contributions_.emplace(Key{instance, k}, Contribution{batch, counters}).second,
          "k " + std::to_string(k) + " was given out twice");
  by_instance_[instance].insert(k);
}

std::uint64_t Registry::root(std::uint64_t version) {
  nodes_[++last_node_] = Node{0, version, {}, {}};
  return last_node_;
}

std::uint64_t Registry::extend(std::uint64_t node, const accumulate::Round& round) {
  check(node, round);
  for (const std::uint64_t child : nodes_.at(node).children) {
    if (nodes_.at(child).record == round.record) return child;
  }
  nodes_[++last_node_] = Node{node, round.number(), round.record, {}};
  nodes_.at(node).children.push_back(last_node_);
  for (const auto& contribution : round.record.contributions) {
    used_in_[{contribution.instance, contribution.k}].push_back(last_node_);
  }
  return last_node_;
}

void Registry::check(std::uint64_t node, const accumulate::Round& round) const {
  const accumulate::RoundRecord& record = round.record;
  const std::string name = "round " + std::to_string(record.round) + ": ";
  require(record.round == version(node) + 1,
          name + "applied at version " + std::to_string(version(node)));
  const accumulate::RoundTimes& times = round.times;
  require(times.cut <= times.reduced && times.reduced != kNever &&
              (times.offered == kNever || times.offered <= times.cut),
          name + "its times are out of order");
  std::vector<std::int64_t> sum(elements_);
  std::int64_t total = 0;
  std::int64_t before_last = -1;
  accumulate::CounterSums counters;
  std::set<Key> seen;
  for (const auto& contribution : record.contributions) {
    const Key key{contribution.instance, contribution.k};
    const auto known = contributions_.find(key);
    require(known != contributions_.end(), name + text(key) + " was never offered");
    require(known->second.batch == contribution.batch, name + text(key) + " has another batch");
    require(seen.insert(key).second, name + text(key) + " is in it twice");
    require(times_in(node, key) == 0, name + text(key) + " was in an earlier round");
    before_last = total;
    total += contribution.batch;
    for (const auto& [counter, value] : known->second.counters) counters[counter].add(value);
    if (contribution.batch == 0) continue;
    const auto [element, value] = one_hot(key, elements_);
    sum[element] += value;
  }
  const auto led = led_by_.find(record.epoch);
  const std::set<std::int64_t> sizes =
      led == led_by_.end() ? std::set{virtual_batch_size_} : led->second;
  require(std::any_of(sizes.begin(), sizes.end(),
                      [&](std::int64_t size) { return before_last < size && size <= total; }),
          name + "is not the shortest prefix of the offers that reaches the virtual batch size");
  require(total == record.total, name + "its total is not the sum of its batches");
  require(counters == record.counters,
          name + "its counters are not the sums of its contributions'");
  require(round.result.size() == elements_ * sizeof(std::int64_t) &&
              std::memcmp(round.result.data(), sum.data(), round.result.size()) == 0,
          name + "its result is not the sum of its contributions");
}

bool Registry::leads_to(std::uint64_t ancestor, std::uint64_t node) const {
  while (node > ancestor) node = nodes_.at(node).parent;  // children are numbered after parents
  return node == ancestor;
}

std::uint64_t Registry::parting(std::uint64_t a, std::uint64_t b) const {
  while (a != b) (a > b ? a : b) = nodes_.at(std::max(a, b)).parent;
  return a == 0 ? 0 : nodes_.at(a).version;
}

std::size_t Registry::times_in(std::uint64_t node, const Key& key) const {
  const auto used = used_in_.find(key);
  if (used == used_in_.end()) return 0;
  std::size_t times = 0;
  for (const std::uint64_t at : used->second) times += leads_to(at, node) ? 1 : 0;
  return times;
}

const std::set<std::uint64_t>& Registry::offers_of(const Uid& instance) const {
  static const std::set<std::uint64_t> kNone;
  const auto at = by_instance_.find(instance);
  return at == by_instance_.end() ? kNone : at->second;
}

}  // namespace moolink::sim
