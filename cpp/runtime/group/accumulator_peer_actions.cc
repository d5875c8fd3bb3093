// Carries out the actions of an accumulator's machine, above all its reductions.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/barrier.h"
#include "io/loop.h"
#include "runtime/group/accumulator_peer.h"

namespace moolink::runtime {

using accumulate::Machine;

void AccumulatorPeer::perform(Time, Machine::Send& action) {
  rpc_->send_service_to(action.instance, action.name, static_cast<rpc::Service>(action.service),
                        std::move(action.payload), group_->name());
}

void AccumulatorPeer::perform(Time now, Machine::EnterEpoch& action) {
  if (layout_.bytes == 0) action.host_keys.clear();  // there is nothing to share
  const bool one_host = collective::share_a_host(action.host_keys);
  runner_->enter(now,
                 {action.epoch, std::move(action.instances), std::move(action.names), one_host,
                  std::move(action.host_keys), std::move(action.observers)},
                 {.code = ErrorCode::group_changed,
                  .message = "the group changed",
                  .function = scope_,
                  .ran = Ran::maybe});
}

void AccumulatorPeer::perform(Time, Machine::Lost& action) {
  std::ranges::move(action.contributions, std::back_inserter(lost_));
}

void AccumulatorPeer::perform(Time, Machine::Divergence& action) {
  std::string names;
  for (const std::string& name : action.names) names += " '" + name + "'";
  divergence_ = {
      .code = ErrorCode::error,
      .message = "the parameters of" + names + " differ from the leader's after round " +
                 std::to_string(action.round) +
                 ": do all peers use the same optimiser, settings and library versions, and does "
                 "nothing else change the parameters, such as an optimizer.step() in the body "
                 "of steps()?",
      .function = scope_};
  diverged_here_ = diverged_here_ || action.here;
  wake();
}

void AccumulatorPeer::perform(Time now, Machine::Demote& action) {
  rpc_->context()->log(LogLevel::warning, "accumulator '" + scope_ + "': peer '" + action.name +
                                              "' becomes a newcomer: " + action.reason);
  group_->ask_demotion(now, action.instance);
}

void AccumulatorPeer::perform(Time, Machine::Failed& action) {
  failure_ = std::move(action.error);
  wake();
}

void AccumulatorPeer::perform(Time, Machine::Log& action) {
  rpc_->context()->log(action.level, "accumulator '" + scope_ + "': " + action.text);
}

// --- rounds

void AccumulatorPeer::perform(Time, Machine::Reduce& action) {
  const std::uint64_t key = next_reduction_++;
  const std::size_t sections = layout_.sections.size();
  Reduction reduction{action.epoch, action.round, std::vector<Buffer>(sections), sections, {}};
  if (action.shared != 0) reduction.whole = rpc_->context()->pool().allocate(layout_.bytes);
  const auto at = reductions_.emplace(key, std::move(reduction)).first;
  for (std::size_t index = 0; index < sections; ++index) {
    try {
      operations_[start(action, index, at->second.whole)] = {key, index};
    } catch (...) {
      reductions_.erase(key);
      throw;
    }
  }
}

// A round is one operation for each section. The leader numbers the rounds that use shared memory,
// so that all members start the same operations in the same order.
collective::OpId AccumulatorPeer::start(const Machine::Reduce& action, std::size_t index,
                                        const MutableBuffer& whole) {
  const BucketSection& section = layout_.sections[index];
  const std::size_t offset = layout_.offsets[index];
  const std::size_t sections = layout_.sections.size();
  collective::OpSpec spec;
  spec.dtype = section.dtype;
  spec.divisor = static_cast<double>(action.total);
  spec.shape = {static_cast<std::int64_t>(section.count)};
  spec.contributors = action.contributors;
  std::vector<Buffer> inputs;
  for (const Buffer& input : action.inputs) {
    inputs.push_back(input.slice(offset, section.bytes()));
  }
  collective::Engine::Options options;
  options.number = action.round * sections + index;
  options.written = action.written;
  options.written.offset = offset;
  if (action.shared != 0) {
    options.shared = (action.shared - 1) * sections + index + 1;
    options.output = whole.slice(offset, section.bytes());
  }
  return runner_->engine().start("round", std::move(spec), std::move(inputs), std::move(options));
}

// The members disagree about an operation in shared memory, or this one cannot continue: the rounds
// of this epoch fail here, and the leader starts a change of epoch.
void AccumulatorPeer::fail_reductions(const Error& error) {
  runner_->leave_segment();
  for (const auto& [key, failed] : std::exchange(reductions_, {})) {
    not_reduced(failed.epoch, failed.round, error);
  }
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
  MutableBuffer& whole = reduction.whole;
  if (whole.empty() && reduction.sections.size() > 1) {
    whole = rpc_->context()->pool().allocate(layout_.bytes);
    for (std::size_t index = 0; index < reduction.sections.size(); ++index) {
      const Buffer& section = reduction.sections[index];
      std::memcpy(whole.data() + layout_.offsets[index], section.data(), section.size());
    }
  }
  const bool exclusive = !whole.empty();
  const Buffer result = exclusive ? Buffer(whole) : reduction.sections.front();
  reduced(reduction.epoch, reduction.round, result, exclusive);
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
