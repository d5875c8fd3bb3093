// Carries out the actions of an accumulator's machine, above all its reductions.

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/barrier.h"
#include "io/loop.h"
#include "runtime/group/accumulator_peer.h"

namespace moolink::runtime {

void AccumulatorPeer::perform(Time, accumulate::Send& action) {
  rpc_->send_service_to(action.instance, action.name, static_cast<rpc::Service>(action.service),
                        std::move(action.payload), group_->name());
}

void AccumulatorPeer::perform(Time now, accumulate::EnterEpoch& action) {
  runner_->enter(now, action.members,
                 {.code = ErrorCode::group_changed,
                  .message = "the group changed",
                  .function = scope_,
                  .ran = Ran::maybe});
}

void AccumulatorPeer::perform(Time, accumulate::Lost& action) {
  std::ranges::move(action.contributions, std::back_inserter(lost_));
}

void AccumulatorPeer::perform(Time, accumulate::Divergence& action) {
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

void AccumulatorPeer::perform(Time now, accumulate::Demote& action) {
  group_->ask_demotion(now, action.instance);
}

void AccumulatorPeer::perform(Time, accumulate::Failed& action) {
  failure_ = std::move(action.error);
  wake();
}

void AccumulatorPeer::perform(Time, accumulate::Log& action) {
  rpc_->context()->log(action.level, "accumulator '" + scope_ + "': " + action.text);
}

// --- rounds

void AccumulatorPeer::perform(Time, accumulate::Reduce& action) {
  const std::size_t sections = layout_.sections.size();
  const auto reduction =
      std::make_shared<Reduction>(Reduction{action.epoch, action.round, sections, {}, {}});
  // Every section is reduced into its place: no copy of the model at the end, under the lock.
  if (action.shared != 0 || sections > 1) {
    reduction->whole = rpc_->context()->pool().allocate(layout_.bytes);
  }
  try {
    for (std::size_t index = 0; index < sections; ++index) {
      operations_[start(action, index, reduction->whole)] = reduction;
    }
  } catch (...) {
    reduction->missing = 0;
    throw;
  }
}

// A round is one operation for each section. The leader numbers the rounds that use shared memory,
// so that all members start the same operations in the same order.
collective::OpId AccumulatorPeer::start(const accumulate::Reduce& action, std::size_t index,
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
  if (action.shared != 0) options.shared = (action.shared - 1) * sections + index + 1;
  if (!whole.empty()) options.output = whole.slice(offset, section.bytes());
  return runner_->engine().start("round", std::move(spec), std::move(inputs), std::move(options));
}

// The members disagree about an operation in shared memory, or this one cannot continue: the rounds
// of this epoch fail here, and the leader starts a change of epoch.
void AccumulatorPeer::fail_reductions(const Error& error) {
  runner_->leave_segment();
  for (const auto& [op, failed] : std::exchange(operations_, {})) {
    if (std::exchange(failed->missing, 0) != 0) not_reduced(*failed, error);
  }
}

void AccumulatorPeer::section_done(collective::Engine::Done done) {
  const auto operation = operations_.extract(done.op);
  if (operation.empty()) return;
  Reduction& reduction = *operation.mapped();
  if (reduction.missing == 0) return;
  if (done.error) {
    reduction.missing = 0;
    // The machine itself handles a change of the group.
    if (done.error.code != ErrorCode::group_changed) not_reduced(reduction, done.error);
    return;
  }
  reduction.only = std::move(done.tensor);
  if (--reduction.missing != 0) return;
  guard([&]() MOOLINK_LOCKED { finish(reduction); },
        [&](const Error& error) MOOLINK_LOCKED { not_reduced(reduction, error); });
}

void AccumulatorPeer::finish(const Reduction& reduction) {
  const bool exclusive = !reduction.whole.empty();
  const Buffer result = exclusive ? Buffer(reduction.whole) : reduction.only;
  const Time now = io::now();
  machine_.reduced(now, reduction.epoch, reduction.round, result, exclusive);
  carry_out(now);
}

void AccumulatorPeer::not_reduced(const Reduction& reduction, const Error& error) {
  machine_.reduce_failed(io::now(), reduction.epoch, reduction.round, error);
  carry_out(io::now());
}

}  // namespace moolink::runtime
