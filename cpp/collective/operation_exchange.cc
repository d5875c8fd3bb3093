// An operation over several hosts: its exchange, among the members or among the hosts of a lane,
// and the results that guests get. See docs/design/protocol/hosts.md.

#include <algorithm>
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

PipelineOperation Operation::pipeline_operation(const OpSpec& spec, const EpochMembers& members,
                                                std::uint32_t rank) {
  const Hosts& hosts = members.hosts;
  PipelineOperation operation;
  operation.dtype = spec.dtype;
  operation.op = spec.op;
  operation.divisor = spec.divisor;
  if (!spec.contributors.empty()) operation.contributors = spec.contributors;
  operation.passage = spec.passage(members.size());
  if (!hosts.share_memory()) return operation;
  operation.exchanged = true;
  operation.divisor = 1;
  operation.passage = passage_of_host(spec, hosts, hosts.of[rank]);
  if (!operation.contributors) return operation;
  operation.contributors->clear();  // their places on this host
  const std::vector<std::uint32_t>& here = hosts.ranks[hosts.of[rank]];
  for (std::uint32_t place = 0; place < here.size(); ++place) {
    if (spec.contributes(here[place])) operation.contributors->push_back(place);
  }
  return operation;
}

Schedule Operation::schedule() const {
  return schedule_for(spec()->count() * partial_size(), hosts().count(),
                      spec()->compression != Compression::none, shared_ == 0 && members().one_host);
}

// The chains of a lane: in shared memory, its slices of the chunks.
std::vector<Range> Operation::chains_of(std::uint32_t lane) const {
  if (shared_ == 0) {
    if (!in_trees()) return {{0, spec()->count()}};
    return chain_ranges(spec()->count(), partial_size(), hosts().count());
  }
  std::vector<Range> chains;
  const std::uint64_t chunks = chunks_of(passage_of_host(), kWindowBytes);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) chains.push_back(slice_of(lane, chunk));
  return chains;
}

void Operation::begin_exchange() {
  if (is_guest()) return await_results();
  const auto lane = hosts().lane(place_.rank);
  if (!lane) return;
  Exchange::Plan plan;
  plan.hosts = hosts().count();
  plan.host = hosts().of[place_.rank];
  plan.first = *lane;
  plan.chains = chains_of(*lane);
  plan.schedule = schedule();
  plan.dtype = spec()->dtype;
  plan.op = spec()->op;
  plan.divisor = spec()->divisor;
  plan.lent = shared_ == 0 && request_.options.lent && sum_of_inputs_.empty();
  if (members().hosts.count() > 1) plan.compression = spec()->compression;
  if (shared_ == 0) have_.assign(plan.chains.size(), 0);
  exchange_.emplace(std::move(plan), shared_ == 0 ? result_ : MutableBuffer(), place_.residual,
                    memory_);
  take_early_portions();
  if (shared_ != 0) return;  // the pipeline provides the host's sums
  most_provided_ = kChainsAhead * hosts().count();
  provide_written();
}

// Provides the chains of this member's input that are written, up to most_provided_.
void Operation::provide_written() {
  while (!error_ && provided_ < std::min<std::size_t>(most_provided_, have_.size())) {
    const Range& range = exchange_->range(provided_);
    if (!request_.options.written.reaches(range.end * item_size_)) {
      return;
    }
    exchange_->provide(provided_++,
                       input_.slice(range.begin * partial_size(), range.count() * partial_size()));
    take_exchange_effects();
  }
}

Range Operation::slice_of(std::uint32_t lane, std::uint64_t chunk) const {
  const Move slice = chunk_plan(passage_of_host(), kWindowBytes, lane, chunk).reduced;
  const std::uint64_t begin = slice.user / item_size_;
  return {begin, begin + slice.bytes / item_size_};
}

void Operation::take_early_portions() {
  for (const auto& [key, elements] : std::exchange(early_portions_, {})) {
    const auto [from, chain, round] = key;
    if (!error_) portion(from, {*spec(), chain, round}, {elements});
  }
}

// --- a guest

// A guest awaits the chains of all lanes, except empty slices, for which nothing is sent.
void Operation::await_results() {
  for (std::uint32_t lane = 0; lane < hosts().lanes; ++lane) {
    for (const Range& chain : chains_of(lane)) {
      awaited_.push_back(chain);
      have_.push_back(shared_ != 0 && chain.empty() ? 2 : 0);
    }
  }
  take_early_portions();
  finish_when_complete();
}

bool Operation::result_for_guest(std::uint32_t from, const Portion& portion,
                                 const Buffer& elements) {
  const auto lane = hosts().lane(from);
  if (hosts().of[from] != hosts().of[place_.rank] || !lane) return false;
  const std::size_t chains = awaited_.size() / hosts().lanes;
  const std::size_t index = *lane * chains + portion.chain;
  if (portion.round != Portion::kForGuest || portion.chain >= chains || have_[index] != 0 ||
      elements.size() != awaited_[index].count() * item_size_) {
    return false;
  }
  have_[index] = 1;
  const MutableBuffer& result = uses_messages_ ? result_ : tensor();
  put(static_cast<std::uint32_t>(index), elements, bytes_of(result, awaited_[index]));
  return true;
}

// --- portions of an exchange

void Operation::summed_here(std::uint32_t chunk, Buffer sum) {
  if (!exchange_ || effects_.finished || error_) return;
  exchange_->provide(chunk, std::move(sum));
  take_exchange_effects();
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
  const bool begun = shared_ != 0 || uses_messages_;
  if (begun && is_guest()) return result_for_guest(from, portion, elements);
  if (!exchange_) return is_all_reduce() && shared_ == 0 && keep_early(from, portion, elements);
  const std::uint32_t host = hosts().of[from];
  if (exchanging_rank(host) != from ||
      !exchange_->received(host, portion.chain, portion.round, elements)) {
    return false;
  }
  take_exchange_effects();
  return true;
}

// Before a member has begun, others can send it their partial sums. If there are many chains, they
// send each element about once; a small payload comes from few members.
bool Operation::keep_early(std::uint32_t from, const Portion& portion, Buffer elements) {
  const std::size_t most = 4 * spec()->count() * partial_size() + (std::size_t{4} << 20);
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
    for (const std::uint32_t guest : hosts().guests[hosts().of[place_.rank]]) {
      effects_.outgoing.push_back(
          {guest, Portion{*spec(), result.chain, Portion::kForGuest}, {result.elements}});
    }
    if (shared_ != 0) {
      effects_.publish.push_back(std::move(result));
    } else {
      put_in_place(std::move(result));
    }
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
  ++most_provided_;
  provide_written();
}

}  // namespace moolink::collective
