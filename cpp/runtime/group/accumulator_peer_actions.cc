// Carries out the actions of an accumulator's machine, above all its reductions.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/barrier.h"
#include "base/crash_point.h"
#include "io/loop.h"
#include "runtime/group/accumulator_peer.h"

namespace moolink::runtime {

using accumulate::Machine;

void AccumulatorPeer::perform(Time, Machine::Send& action) {
  rpc_->send_service_to(action.instance, action.name, static_cast<rpc::Service>(action.service),
                        std::move(action.payload), group_->name());
}

void AccumulatorPeer::perform(Time now, Machine::EnterEpoch& action) {
  const bool one_host = collective::share_a_host(action.host_keys);
  shared_->leave();  // for all its ranks
  shared_reductions_.clear();
  const bool shares = one_host && layout_.bytes != 0;
  shared_->enter(now, {action.epoch, action.instances, action.names, shares});
  runner_->engine().set_members(
      {action.epoch, std::move(action.instances), std::move(action.names), one_host,
       std::move(action.host_keys)},
      {ErrorCode::group_changed, "the group changed", {}, scope_, {}, {}, Ran::maybe});
}

void AccumulatorPeer::perform(Time, Machine::WantState&) { wake(); }

// Sends no message: this peer is out of the group, and will start from another state.
void AccumulatorPeer::perform(Time, Machine::Dropped&) {}

void AccumulatorPeer::perform(Time, Machine::Lost& action) {
  std::ranges::move(action.contributions, std::back_inserter(lost_));
}

void AccumulatorPeer::perform(Time, Machine::Divergence& action) {
  std::string names;
  for (const std::string& name : action.names) names += " '" + name + "'";
  divergence_ = {
      ErrorCode::error,
      "the parameters of" + names + " differ from the leader's after round " +
          std::to_string(action.round) +
          ": do all peers use the same optimiser, settings and library versions, and does "
          "nothing else change the parameters, such as an optimizer.step() in the body "
          "of steps()?",
      {},
      scope_,
      {},
      {},
      Ran::no};
  diverged_here_ = diverged_here_ || action.here;
  wake();
}

void AccumulatorPeer::perform(Time now, Machine::Demote& action) {
  rpc_->context()->log(LogLevel::warning, "accumulator '" + scope_ + "': peer '" + action.name +
                                              "' becomes a newcomer: " + action.reason);
  group_->ask_demotion(now, action.instance);
}

void AccumulatorPeer::perform(Time now, Machine::Activate& action) {
  group_->activate(now, *this, action.epoch);
}

void AccumulatorPeer::perform(Time now, Machine::HasState& action) {
  group_->set_has_state(now, *this, action.has_state);
}

void AccumulatorPeer::perform(Time now, Machine::StaleFrame& action) {
  group_->stale_frame(now, action.instance, action.epoch);
}

void AccumulatorPeer::perform(Time, Machine::Failed& action) {
  failure_ = std::move(action.error);
  wake();
}

void AccumulatorPeer::perform(Time, Machine::Wake&) { wake(); }

void AccumulatorPeer::perform(Time, Machine::Log& action) {
  rpc_->context()->log(action.level, "accumulator '" + scope_ + "': " + action.text);
}

// --- rounds

void AccumulatorPeer::perform(Time, Machine::Reduce& action) {
  if (action.shared != 0) return reduce_in_shared_memory(action);
  const std::uint64_t key = next_reduction_++;
  Reduction reduction{action.epoch, action.round, std::vector<Buffer>(layout_.sections.size()),
                      layout_.sections.size()};
  reductions_.emplace(key, std::move(reduction));
  for (std::size_t index = 0; index < layout_.sections.size(); ++index) {
    const BucketSection& section = layout_.sections[index];
    collective::OpSpec spec;
    spec.dtype = section.dtype;
    spec.divisor = static_cast<double>(action.total);
    spec.shape = {static_cast<std::int64_t>(section.count)};
    spec.contributors = action.contributors;
    spec.reducers = action.reducers;
    std::vector<Buffer> inputs;
    for (const Buffer& input : action.inputs) {
      inputs.push_back(input.slice(layout_.offsets[index], section.bytes()));
    }
    try {
      const collective::OpId op =
          runner_->engine().start("round", std::move(spec), std::move(inputs),
                                  {false, action.round * layout_.sections.size() + index});
      operations_[op] = {key, index};
    } catch (...) {
      reductions_.erase(key);
      throw;
    }
  }
}

// The leader numbers the rounds of an epoch: all members pass the same operations in one order.
void AccumulatorPeer::reduce_in_shared_memory(Machine::Reduce& action) {
  const std::size_t sections = layout_.sections.size();
  const std::uint64_t first = (action.shared - 1) * sections + 1;
  const MutableBuffer result = rpc_->context()->pool().allocate(layout_.bytes);
  shared_reductions_.push_back({action.epoch, action.round, first + sections - 1, result});
  const std::size_t ranks = runner_->engine().members().instances.size();
  for (std::size_t index = 0; index < sections; ++index) {
    const BucketSection& section = layout_.sections[index];
    const std::size_t offset = layout_.offsets[index];
    collective::PipelineOperation operation;
    operation.s = first + index;
    operation.passage = {collective::Kind::all_reduce, 0, static_cast<std::uint32_t>(ranks),
                         tensor::item_size(section.dtype), section.count};
    operation.dtype = section.dtype;
    operation.divisor = static_cast<double>(action.total);
    operation.contributors = action.contributors;
    for (const Buffer& input : action.inputs) {
      operation.inputs.push_back(input.slice(offset, section.bytes()));
    }
    operation.output = result.slice(offset, section.bytes());
    shared_->start(std::move(operation));
  }
  crash_point("slice.sent");
}

void AccumulatorPeer::shared_ended(std::uint64_t s) {
  if (shared_reductions_.empty() || shared_reductions_.front().last != s) return;
  SharedReduction done = std::move(shared_reductions_.front());
  shared_reductions_.pop_front();
  reduced(done.epoch, done.round, std::move(done.result), true);
}

// The operations after this one fail too: they do not start without it.
void AccumulatorPeer::shared_failed(std::uint64_t s, const Error& error) {
  const auto found = std::ranges::find_if(
      shared_reductions_, [s](const SharedReduction& reduction) { return reduction.last >= s; });
  if (found == shared_reductions_.end()) return;
  const SharedReduction failed = std::move(*found);
  shared_reductions_.erase(found);
  not_reduced(failed.epoch, failed.round, error);
}

// The members disagree, or this one cannot continue: the rounds of this epoch fail here, and the
// leader starts a change of epoch.
void AccumulatorPeer::shared_broken(const Error& error) {
  shared_->leave();
  for (const SharedReduction& failed : std::exchange(shared_reductions_, {})) {
    not_reduced(failed.epoch, failed.round, error);
  }
}

void AccumulatorPeer::end(const Machine::Send& action, const Error& error) {
  rpc_->fail_peer(action.instance, error);
}

void AccumulatorPeer::end(const Machine::Reduce& action, const Error& error) {
  machine_.reduce_failed(io::now(), action.epoch, action.round, error);
}

void AccumulatorPeer::section_done(collective::Engine::Done done) {
  const auto operation = operations_.find(done.op);
  if (operation == operations_.end()) return;
  const auto [key, index] = operation->second;
  operations_.erase(operation);
  const auto found = reductions_.find(key);
  if (found == reductions_.end()) return;
  if (done.error) {
    const Reduction failed = std::move(found->second);
    reductions_.erase(found);
    // The machine itself handles a change of the group.
    if (done.error.code == ErrorCode::group_changed) return;
    not_reduced(failed.epoch, failed.round, done.error);
    return;
  }
  found->second.sections[index] = std::move(done.tensor);
  if (--found->second.missing == 0) {
    Reduction reduction = std::move(found->second);
    reductions_.erase(found);
    const std::uint64_t epoch = reduction.epoch;
    const std::uint64_t round = reduction.round;
    guard([&] { finish(std::move(reduction)); },
          [&](const Error& error) { not_reduced(epoch, round, error); });
  }
}

void AccumulatorPeer::finish(Reduction reduction) {
  Buffer result = reduction.sections.front();
  if (reduction.sections.size() > 1) {
    const MutableBuffer whole = rpc_->context()->pool().allocate(layout_.bytes);
    for (std::size_t index = 0; index < reduction.sections.size(); ++index) {
      const Buffer& section = reduction.sections[index];
      std::memcpy(whole.data() + layout_.offsets[index], section.data(), section.size());
    }
    result = whole;
  }
  reduced(reduction.epoch, reduction.round, std::move(result), reduction.sections.size() > 1);
}

void AccumulatorPeer::reduced(std::uint64_t epoch, std::uint64_t round, Buffer result,
                              bool exclusive) {
  const Time now = io::now();
  guard([&] { machine_.reduced(now, epoch, round, std::move(result), exclusive); },
        [&](const Error& error) { machine_.reduce_failed(now, epoch, round, error); });
  carry_out(now);
}

void AccumulatorPeer::not_reduced(std::uint64_t epoch, std::uint64_t round, const Error& error) {
  machine_.reduce_failed(io::now(), epoch, round, error);
  carry_out(io::now());
}

}  // namespace moolink::runtime
