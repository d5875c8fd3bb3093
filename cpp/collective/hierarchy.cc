#include "collective/hierarchy.h"

#include <algorithm>
#include <iterator>

#include "base/mutant.h"

namespace moolink::collective {
namespace {

// Tasks of the exchange and of this machine share one numbering.
constexpr std::uint32_t of_exchange(std::uint32_t task) { return 2 * task + 1; }
constexpr std::uint32_t of_own(std::uint32_t task) { return 2 * task; }

std::uint32_t fewest(const std::vector<std::vector<std::uint32_t>>& ranks) {
  std::size_t least = ranks.empty() ? 1 : ranks.front().size();
  for (const auto& there : ranks) least = std::min(least, there.size());
  return static_cast<std::uint32_t>(least);
}

}  // namespace

Hosts hosts_of(const std::vector<Uid>& keys) {
  Hosts hosts;
  std::map<Uid, std::uint32_t> numbers;
  for (std::uint32_t rank = 0; rank < keys.size(); ++rank) {
    std::uint32_t host = hosts.count();
    if (!keys[rank].empty()) host = numbers.emplace(keys[rank], host).first->second;
    if (host == hosts.count()) hosts.ranks.emplace_back();
    hosts.of.push_back(host);
    hosts.ranks[host].push_back(rank);
  }
  hosts.lanes = fewest(hosts.ranks);
  return hosts;
}

std::optional<std::uint32_t> Hosts::lane(std::uint32_t rank) const {
  const std::vector<std::uint32_t>& there = ranks[of[rank]];
  const auto at = std::find(there.begin(), there.begin() + lanes, rank) - there.begin();
  return at < lanes ? std::optional(static_cast<std::uint32_t>(at)) : std::nullopt;
}

bool share_a_host(const std::vector<Uid>& keys) {
  return !keys.empty() && !keys.front().empty() &&
         std::count(keys.begin(), keys.end(), keys.front()) == std::ssize(keys);
}

Hosts hosts_led_by(const std::vector<std::uint32_t>& reducers, const Hosts& hosts) {
  Hosts led;
  std::vector<std::uint32_t> others;
  std::vector<std::vector<std::uint32_t>> leaders;
  for (const std::vector<std::uint32_t>& ranks : hosts.ranks) {
    std::vector<std::uint32_t> there(ranks);
    const auto end = std::stable_partition(there.begin(), there.end(), [&](std::uint32_t rank) {
      return std::binary_search(reducers.begin(), reducers.end(), rank);
    });
    if (end == there.begin()) {
      others.insert(others.end(), ranks.begin(), ranks.end());
      continue;
    }
    leaders.emplace_back(there.begin(), end);
    led.ranks.push_back(std::move(there));
  }
  led.lanes = fewest(leaders);
  for (std::size_t i = 0; i < others.size(); ++i) {
    led.ranks[i % led.ranks.size()].push_back(others[i]);
  }
  led.of.resize(hosts.of.size());
  for (std::uint32_t host = 0; host < led.count(); ++host) {
    for (const std::uint32_t rank : led.ranks[host]) led.of[rank] = host;
  }
  return led;
}

HierarchicalReduce::HierarchicalReduce(const OpSpec& spec, const Place& place, Buffer input,
                                       MutableBuffer result, MutableBuffer residual,
                                       Allocator& memory)
    : spec_(spec),
      hosts_(*place.hosts),
      rank_(place.rank),
      host_(hosts_.of[rank_]),
      input_(std::move(input)),
      result_(std::move(result)),
      memory_(memory),
      item_size_(tensor::item_size(spec.dtype)) {
  std::copy_if(neighbours().begin(), neighbours().end(), std::back_inserter(contributors_),
               [&](std::uint32_t rank) { return spec.contributes(rank); });
  std::sort(contributors_.begin(), contributors_.end());
  contributes_ = spec.contributes(rank_);
  const std::uint64_t count = spec.count();
  chains_ = schedule(count, tensor::item_size(partial_dtype(spec.dtype)), hosts_.count(), host_,
                     place.segment_bytes)
                .chains;
  if (const auto lane = hosts_.lane(rank_)) {
    Exchange::Plan plan;
    plan.hosts = hosts_.count();
    plan.host = host_;
    plan.lanes = hosts_.lanes;
    plan.lane = *lane;
    plan.count = count;
    plan.dtype = spec.dtype;
    plan.op = spec.op;
    plan.divisor = spec.divisor;
    plan.compression = spec.compression;
    plan.segment_bytes = place.segment_bytes;
    exchange_.emplace(plan, result_, std::move(residual), memory);
  }
  for (const Chain& chain : chains_) {
    if (!leads(chain.id)) lacking_.insert(chain.id);
  }
}

std::uint32_t HierarchicalReduce::leader(std::uint32_t host, std::uint32_t chain) const {
  const std::uint32_t lane = lane_of(chain, hosts_.count(), hosts_.lanes);
  return hosts_.leader(host, mutant("send_to_the_first_leader") ? 0 : lane);
}

Buffer HierarchicalReduce::input_of(const Chain& chain) const {
  return input_.slice(chain.range.begin * item_size_, chain.range.count() * item_size_);
}

MutableBuffer HierarchicalReduce::result_of(const Chain& chain) const {
  return result_.slice(chain.range.begin * item_size_, chain.range.count() * item_size_);
}

void HierarchicalReduce::send(std::uint32_t to, std::uint32_t chain, std::uint32_t round,
                              Buffer elements) {
  effects_.outgoing.push_back({to, {spec_, chain, round}, {std::move(elements)}});
}

void HierarchicalReduce::begin() {
  for (const Chain& chain : chains_) {
    if (leads(chain.id)) {
      provide_own(chain);
    } else if (contributes_) {
      send(leader(host_, chain.id), chain.id, Portion::kToLeader, input_of(chain));
    }
  }
  std::sort(chains_.begin(), chains_.end(),
            [](const Chain& a, const Chain& b) { return a.id < b.id; });
}

void HierarchicalReduce::provide_own(const Chain& chain) {
  if (contributors_.empty()) {
    if (mutant("no_zeros")) return;
    exchange_->provide(chain.id, zeros(chain));
    return take_exchange_effects();
  }
  inputs_[chain.id];  // the others' inputs are awaited from now on
  if (contributes_) local_input(rank_, chain.id, input_of(chain));
}

// Partial sums of nothing.
Buffer HierarchicalReduce::zeros(const Chain& chain) {
  const std::size_t bytes = chain.range.count() * tensor::item_size(partial_dtype(spec_.dtype));
  if (zeros_.size() < bytes) {
    const MutableBuffer made = memory_.allocate(bytes);
    std::fill_n(made.data(), bytes, std::byte{0});
    zeros_ = made;
  }
  return zeros_.slice(0, bytes);
}

bool HierarchicalReduce::received(std::uint32_t from, const Portion& portion,
                                  const std::vector<Buffer>& parts) {
  const std::uint32_t id = portion.chain;
  if (parts.size() != 1 || id >= chains_.size()) return false;
  const bool neighbour = hosts_.of[from] == host_;
  const std::size_t bytes = chains_[id].range.count() * item_size_;
  if (portion.round == Portion::kToLeader) {
    const bool contributes = std::binary_search(contributors_.begin(), contributors_.end(), from);
    if (!leads(id) || !contributes || parts[0].size() != bytes) return false;
    if (const auto had = inputs_.find(id); had == inputs_.end() || had->second.contains(from)) {
      return false;
    }
    local_input(from, id, parts[0]);
    return true;
  }
  if (portion.round == Portion::kFromLeader) {
    if (leads(id) || from != leader(host_, id) || parts[0].size() != bytes) return false;
    if (lacking_.erase(id) == 0) return false;
    const std::uint32_t task = of_own(next_task_++);
    copies_.emplace(task, id);
    effects_.tasks.push_back(
        {task, SumTask{spec_.dtype, spec_.op, 1, parts, result_of(chains_[id])}});
    return true;
  }
  if (!leads(id) || neighbour || from != leader(hosts_.of[from], id)) return false;
  if (!exchange_->received(hosts_.of[from], id, portion.round, parts[0])) return false;
  take_exchange_effects();
  return true;
}

// An input of one of this host's contributors; the last one of a chain makes the host's sum.
void HierarchicalReduce::local_input(std::uint32_t from, std::uint32_t chain, Buffer elements) {
  auto& inputs = inputs_[chain];
  inputs.emplace(from, std::move(elements));
  const std::size_t needed = contributors_.size() - (mutant("sum_before_the_last") ? 1 : 0);
  if (inputs.size() < std::max<std::size_t>(1, needed)) return;
  SumTask task{spec_.dtype, spec_.op, 1, {}, {}};
  for (auto& [rank, bytes] : inputs) task.inputs.push_back(std::move(bytes));
  inputs_.erase(chain);
  if (task.inputs.size() == 1 && partial_dtype(spec_.dtype) == spec_.dtype) {
    exchange_->provide(chain, std::move(task.inputs[0]));
    return take_exchange_effects();
  }
  task.partial_output = true;
  task.output = memory_.allocate(exchange_->chain(chain).range.count() *
                                 tensor::item_size(partial_dtype(spec_.dtype)));
  const std::uint32_t id = of_own(next_task_++);
  sums_.emplace(id, std::pair(chain, Buffer(task.output)));
  effects_.tasks.push_back({id, std::move(task)});
}

void HierarchicalReduce::done(std::uint32_t task) {
  if (task % 2 == 1) {
    exchange_->done(task / 2);
    return take_exchange_effects();
  }
  copies_.erase(task);
  const auto sum = sums_.find(task);
  if (sum == sums_.end()) return;
  const auto [chain, partial] = std::move(sum->second);
  sums_.erase(sum);
  exchange_->provide(chain, partial);
  take_exchange_effects();
}

void HierarchicalReduce::take_exchange_effects() {
  Exchange::Effects effects = exchange_->take_effects();
  for (auto& outgoing : effects.outgoing) {
    send(leader(outgoing.host, outgoing.chain), outgoing.chain, outgoing.round,
         std::move(outgoing.elements));
  }
  for (auto& task : effects.tasks) {
    effects_.tasks.push_back({of_exchange(task.id), std::move(task.work)});
  }
  for (const std::uint32_t chain : effects.in_place) {
    for (const std::uint32_t rank : neighbours()) {
      if (rank == rank_) continue;
      send(rank, chain, Portion::kFromLeader, result_of(exchange_->chain(chain)));
    }
  }
}

bool HierarchicalReduce::complete() const {
  return (!exchange_ || exchange_->complete()) && lacking_.empty() && copies_.empty();
}

std::set<std::uint32_t> HierarchicalReduce::waiting_for() const {
  std::set<std::uint32_t> ranks;
  for (const std::uint32_t chain : lacking_) ranks.insert(leader(host_, chain));
  for (const auto& [chain, inputs] : inputs_) {
    for (const std::uint32_t rank : contributors_) {
      if (!inputs.contains(rank)) ranks.insert(rank);
    }
  }
  if (!exchange_) return ranks;
  for (const std::uint32_t host : exchange_->waiting_for()) {
    if (host != host_) ranks.insert(hosts_.leader(host, *hosts_.lane(rank_)));
  }
  return ranks;
}

}  // namespace moolink::collective
