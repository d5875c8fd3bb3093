// An operation over several hosts: its exchange, among the members or among the hosts of a lane,
// and the results that guests get. See docs/design/protocol/hosts.md.

#include <utility>

#include "collective/operation.h"

namespace moolink::collective {
namespace {

// Of an exchange among all members: the most chains under way at one, for each member.
constexpr std::uint32_t kChainsAhead = 4;

}  // namespace

Passage Operation::passage_of_host(const OpSpec& spec, const Hosts& hosts, std::uint32_t host) {
  Passage passage = spec.passage(hosts.ranks[host].size());
  passage.owners = hosts.lanes;
  return passage;
}

PipelineOperation Operation::pipeline_operation(const OpSpec& spec, std::size_t members,
                                                const Hosts* hosts, std::uint32_t rank) {
  PipelineOperation operation;
  operation.dtype = spec.dtype;
  operation.op = spec.op;
  operation.divisor = spec.divisor;
  if (!spec.contributors.empty()) operation.contributors = spec.contributors;
  operation.passage = spec.passage(members);
  if (hosts == nullptr || !hosts->share_memory()) return operation;
  operation.exchanged = true;
  operation.divisor = 1;
  operation.passage = passage_of_host(spec, *hosts, hosts->of[rank]);
  if (!operation.contributors) return operation;
  operation.contributors->clear();  // their places on this host
  const std::vector<std::uint32_t>& here = hosts->ranks[hosts->of[rank]];
  for (std::uint32_t place = 0; place < here.size(); ++place) {
    if (spec.contributes(here[place])) operation.contributors->push_back(place);
  }
  return operation;
}

Exchange::Plan Operation::exchange_plan() const {
  Exchange::Plan plan;
  plan.small = is_small(spec()->count(), tensor::item_size(partial_dtype(spec()->dtype)));
  plan.dtype = spec()->dtype;
  plan.op = spec()->op;
  plan.divisor = spec()->divisor;
  plan.compression = spec()->compression;
  return plan;
}

// Each member as if it were a host.
void Operation::exchange_among_members() {
  Exchange::Plan plan = exchange_plan();
  const std::size_t item_size = tensor::item_size(partial_dtype(plan.dtype));
  plan.hosts = static_cast<std::uint32_t>(place_.names.size());
  plan.host = place_.rank;
  plan.chains = chain_ranges(spec()->count(), item_size, plan.hosts);
  have_.assign(plan.chains.size(), 0);
  const std::uint32_t ahead = kChainsAhead * plan.hosts;
  begin_exchange(std::move(plan), result_);
  for (std::uint32_t i = 0; i < ahead && !error_; ++i) provide_next();
}

void Operation::provide_next() {
  if (provided_ == have_.size()) return;
  const Range& range = exchange_->range(provided_);
  const std::size_t item_size = tensor::item_size(partial_dtype(spec()->dtype));
  exchange_->provide(provided_++, input_.slice(range.begin * item_size, range.count() * item_size));
  take_exchange_effects();
}

// Of this member's lane, if it leads one: a chain is its slice of a chunk in shared memory.
void Operation::exchange_among_hosts() {
  const auto lane = place_.hosts->lane(place_.rank);
  if (!lane) return;
  Exchange::Plan plan = exchange_plan();
  plan.hosts = place_.hosts->count();
  plan.host = place_.hosts->of[place_.rank];
  plan.first = *lane;
  const std::uint64_t chunks = chunks_of(passage_of_host(), kWindowBytes);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    plan.chains.push_back(slice_of(*lane, chunk));
  }
  begin_exchange(std::move(plan), {});
}

Range Operation::slice_of(std::uint32_t lane, std::uint64_t chunk) const {
  const Move slice = chunk_plan(passage_of_host(), kWindowBytes, lane, chunk).reduced;
  const std::uint64_t begin = slice.user / item_size_;
  return {begin, begin + slice.bytes / item_size_};
}

void Operation::begin_exchange(Exchange::Plan plan, MutableBuffer result) {
  exchange_.emplace(std::move(plan), std::move(result), place_.residual, memory_);
  take_early_portions();
}

void Operation::take_early_portions() {
  for (const auto& [key, elements] : std::exchange(early_portions_, {})) {
    const auto [from, chain, round] = key;
    if (!error_) portion(from, {*spec(), chain, round}, {elements});
  }
}

// --- a guest

// Of each chunk, the slices of all lanes.
void Operation::await_results() {
  const std::uint32_t lanes = place_.hosts->lanes;
  const std::uint64_t chunks = chunks_of(passage_of_host(), kWindowBytes);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      have_.push_back(slice_of(lane, chunk).empty() ? 2 : 0);
    }
  }
  take_early_portions();
  finish_when_complete();
}

bool Operation::result_for_guest(std::uint32_t from, const Portion& portion,
                                 const Buffer& elements) {
  const Hosts& hosts = *place_.hosts;
  const auto lane = hosts.lane(from);
  if (hosts.of[from] != hosts.of[place_.rank] || !lane) return false;
  const std::uint64_t index = std::uint64_t{portion.chain} * hosts.lanes + *lane;
  if (portion.round != Portion::kForGuest || index >= have_.size() || have_[index] != 0) {
    return false;
  }
  const Range slice = slice_of(*lane, portion.chain);
  if (elements.size() != slice.count() * item_size_) return false;
  have_[index] = 1;
  put(static_cast<std::uint32_t>(index), elements, bytes_of(tensor(), slice));
  return true;
}

// --- portions of an exchange

void Operation::summed_here(std::uint32_t chunk, Buffer sum) {
  if (!exchange_ || effects_.finished || error_) return;
  exchange_->provide(chunk, std::move(sum));
  take_exchange_effects();
}

bool Operation::may_exchange_later() const {
  if (shared_ != 0 || spec()->kind != Kind::all_reduce || place_.hosts == nullptr) return false;
  const bool may_share = asks_ && !went_ && shares_hosts();
  return flat_ || may_share;
}

std::uint32_t Operation::exchanging_rank(std::uint32_t host) const {
  return exchanges_as_member() ? host
                               : place_.hosts->leader(host, *place_.hosts->lane(place_.rank));
}

// Other members may begin before this one has summed its own inputs or received Go.
void Operation::portion(std::uint32_t from, const Portion& portion,
                        const std::vector<Buffer>& parts) {
  if (portion.spec != *spec()) return refuse(from, difference(from, portion.spec));
  if (parts.size() != 1 || !take_portion(from, portion, parts[0])) {
    return refuse(
        from, name_of(from) + " sent elements that " + name_of(place_.rank) + " does not expect");
  }
}

bool Operation::take_portion(std::uint32_t from, const Portion& portion, const Buffer& elements) {
  if (shared_ != 0 && is_guest()) return result_for_guest(from, portion, elements);
  if (!exchange_) return may_exchange_later() && keep_early(from, portion, elements);
  const std::uint32_t host = exchanges_as_member() ? from : place_.hosts->of[from];
  if (exchanging_rank(host) != from ||
      !exchange_->received(host, portion.chain, portion.round, elements)) {
    return false;
  }
  take_exchange_effects();
  return true;
}

// In a ring, one neighbour sends each element at most twice. Few members send a small payload.
bool Operation::keep_early(std::uint32_t from, const Portion& portion, Buffer elements) {
  const std::size_t item_size = tensor::item_size(partial_dtype(spec()->dtype));
  const std::size_t most = 4 * spec()->count() * item_size + 64 * kSmallExchange;
  early_bytes_ += elements.size() + kCacheLine;
  return early_bytes_ <= most &&
         early_portions_
             .emplace(std::tuple(from, portion.chain, portion.round), std::move(elements))
             .second;
}

void Operation::take_exchange_effects() {
  Exchange::Effects effects = exchange_->take_effects();
  for (auto& outgoing : effects.outgoing) {
    effects_.outgoing.push_back({exchanging_rank(outgoing.host),
                                 Portion{*spec(), outgoing.chain, outgoing.round},
                                 {std::move(outgoing.elements)}});
  }
  for (auto& task : effects.tasks) {
    effects_.tasks.push_back({of_exchange(task.id), std::move(task.work)});
  }
  for (auto& result : effects.results) {
    if (shared_ != 0) {
      for (const std::uint32_t guest : place_.hosts->guests[place_.hosts->of[place_.rank]]) {
        effects_.outgoing.push_back(
            {guest, Portion{*spec(), result.chain, Portion::kForGuest}, {result.elements}});
      }
      effects_.publish.push_back(std::move(result));
      continue;
    }
    put_in_place(std::move(result));
  }
}

// Begins the next chain. Few are under way at a time, so that each is still in the cache.
void Operation::put_in_place(Exchange::Result result) {
  const MutableBuffer place = bytes_of(result_, exchange_->range(result.chain));
  if (result.elements.data() == place.data()) {
    have_[result.chain] = 2;
    finish_when_complete();
  } else {
    have_[result.chain] = 1;
    put(of_own(result.chain), result.elements, place);
  }
  provide_next();
}

}  // namespace moolink::collective
