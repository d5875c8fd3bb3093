#include "collective/exchange.h"

#include <algorithm>

#include "base/mutant.h"
#include "tensor/dtype.h"

namespace moolink::collective {
namespace {

using StepKind = Step::Kind;

bool is_receive(const Step& step) {
  return step.kind == StepKind::reduce || step.kind == StepKind::store;
}

}  // namespace

Exchange::Exchange(const Plan& plan, MutableBuffer result, MutableBuffer residual,
                   Allocator& memory)
    : plan_(plan),
      result_(std::move(result)),
      residual_(std::move(residual)),
      memory_(memory),
      item_size_(tensor::item_size(plan.dtype)),
      partial_size_(tensor::item_size(partial_dtype(plan.dtype))) {
  schedule_ = schedule(plan_.count, partial_size_, plan_.hosts, plan_.host, plan_.segment_bytes);
  // Several hosts then encode the same elements, and each would round them differently.
  if (schedule_.computed_by_many) plan_.compression = Compression::none;
  position_.resize(schedule_.chains.size());
  states_.resize(schedule_.chains.size());
  std::erase_if(schedule_.chains, [this](const Chain& chain) { return !is_chain(chain.id); });
  for (std::size_t i = 0; i < schedule_.chains.size(); ++i) {
    position_[schedule_.chains[i].id] = i;
  }
}

void Exchange::provide(std::uint32_t chain, Buffer partial) {
  states_[chain].value = std::move(partial);
  states_[chain].has_value = true;
  advance(chain);
}

std::size_t Exchange::travelling_size(const Chain& chain, bool partial) const {
  const std::uint64_t count = chain.range.count();
  if (plan_.compression != Compression::none) return encoded_size(plan_.compression, count);
  return count * (partial ? partial_size_ : item_size_);
}

bool Exchange::received(std::uint32_t host, std::uint32_t chain_id, std::uint32_t round,
                        Buffer elements) {
  if (!is_chain(chain_id)) return false;
  State& state = states_[chain_id];
  const Chain& chain = this->chain(chain_id);
  const auto step = std::find_if(
      chain.steps.begin() + static_cast<std::ptrdiff_t>(state.step), chain.steps.end(),
      [&](const Step& s) { return is_receive(s) && s.peer == host && s.round == round; });
  if (step == chain.steps.end() || state.arrived.contains(round) ||
      elements.size() != travelling_size(chain, step->kind == StepKind::reduce)) {
    return false;
  }
  state.arrived.emplace(round, std::move(elements));
  advance(chain_id);
  return true;
}

void Exchange::advance(std::uint32_t id) {
  const Chain& chain = this->chain(id);
  State& state = states_[id];
  while (!state.busy && state.step < chain.steps.size() && do_step(id, chain, state)) {
  }
}

// Returns whether the step was done or begun; a task that makes the next value leaves `busy` set.
bool Exchange::do_step(std::uint32_t id, const Chain& chain, State& state) {
  const Step& step = chain.steps[state.step];
  if (step.kind != StepKind::store && !state.has_value) return false;
  if (is_receive(step) && !state.arrived.contains(step.round)) return false;
  switch (step.kind) {
    case StepKind::send:
      return send(id, chain, state, step);
    case StepKind::reduce:
      reduce(id, chain, state, step);
      break;
    case StepKind::finish:
      finish(id, chain, state);
      break;
    case StepKind::store:
      store(id, chain, state, step);
      break;
  }
  ++state.step;
  return true;
}

// A message that queues behind others on the same link does not help its receiver. A few chains for
// each hop keep the links busy, and each chain arrives early.
bool Exchange::may_start(std::uint32_t id) {
  if (schedule_.computed_by_many) return true;
  if (on_their_way_ == std::size_t{4} * (plan_.hosts - 1)) {
    held_back_.push_back(id);
    return false;
  }
  ++on_their_way_;
  return true;
}

// The result of a chain that started here has arrived: another one may start.
void Exchange::came_around() {
  --on_their_way_;
  if (held_back_.empty() || mutant("hold_back_for_ever")) return;
  const std::uint32_t next = held_back_.front();
  held_back_.pop_front();
  states_[next].held_back = false;
  advance(next);
}

bool Exchange::send(std::uint32_t id, const Chain& chain, State& state, const Step& step) {
  if (state.step == 0 && !state.started) {
    if (state.held_back || !may_start(id)) {
      state.held_back = true;
      return false;
    }
    state.started = true;
  }
  if (plan_.compression != Compression::none && !state.encoded) {
    Work work;
    Pending pending{id, true, false, {}, true};
    pending.value = encode(chain, state.value, work);
    add_task(id, state, std::move(work), std::move(pending));
    return true;  // and send in the same step, once it is encoded
  }
  effects_.outgoing.push_back({step.peer, id, step.round, state.value});
  ++state.step;
  return true;
}

SumTask Exchange::sum_task(std::vector<Buffer> inputs) const {
  SumTask task{plan_.dtype, plan_.op, 1, std::move(inputs), {}};
  task.partial_inputs = task.partial_output = true;
  return task;
}

// Makes it the last task: from the sum of all hosts to the stored elements.
void Exchange::into_result(const Chain& chain, SumTask& task) const {
  task.divisor = mutant("finish_without_division") ? 1 : plan_.divisor;
  task.partial_output = false;
  task.canonical_nan = schedule_.computed_by_many;
  task.output = result_of(chain);
}

MutableBuffer Exchange::result_of(const Chain& chain) const {
  return result_.slice(chain.range.begin * item_size_, chain.range.count() * item_size_);
}

// Adds the encoding of a float32 value to `work`, and returns its output.
Buffer Exchange::encode(const Chain& chain, const Buffer& value, Work& work) const {
  EncodeTask task{plan_.compression, value, {}, {}};
  task.output = memory_.allocate(encoded_size(plan_.compression, chain.range.count()));
  if (!residual_.empty() && !mutant("forget_residual")) {
    task.residual =
        residual_.slice(mutant("residual_of_another_chain") ? 0 : chain.range.begin * sizeof(float),
                        chain.range.count() * sizeof(float));
  }
  Buffer encoded = task.output;
  work.pieces.emplace_back(std::move(task));
  return encoded;
}

void Exchange::reduce(std::uint32_t id, const Chain& chain, State& state, const Step& step) {
  Buffer theirs = std::move(state.arrived.at(step.round));
  state.arrived.erase(step.round);
  Work work;
  if (plan_.compression != Compression::none) {
    DecodeTask decode{plan_.compression, std::move(theirs), {}};
    decode.output = memory_.allocate(chain.range.count() * sizeof(float));
    theirs = decode.output;
    work.pieces.emplace_back(std::move(decode));
  }
  std::vector<Buffer> inputs{state.value, theirs};
  if (step.theirs_first) std::swap(inputs[0], inputs[1]);
  if (mutant("reduce_without_own")) inputs = {theirs};
  SumTask task = sum_task(std::move(inputs));
  const bool is_last = chain.steps[state.step + 1].kind == StepKind::finish;
  Pending pending{id, true, false, {}, false};
  if (is_last && plan_.compression == Compression::none) {  // in one pass
    into_result(chain, task);
    pending.stores = true;
    ++state.step;
  } else {
    task.output = memory_.allocate(chain.range.count() * partial_size_);
  }
  pending.value = task.output;
  work.pieces.emplace_back(std::move(task));
  add_task(id, state, std::move(work), std::move(pending));
}

// The sum of all hosts becomes the result. The owner keeps compressed elements as the others get
// them.
void Exchange::finish(std::uint32_t id, const Chain& chain, State& state) {
  SumTask task = sum_task({state.value});
  into_result(chain, task);
  const MutableBuffer result = task.output;
  Work work;
  work.pieces.emplace_back(std::move(task));
  Pending pending{id, true, true, result, false};
  if (plan_.compression != Compression::none && plan_.hosts > 1) {
    pending.value = encode(chain, result, work);
    pending.encoded = true;
    if (!mutant("keep_uncompressed")) {
      work.pieces.emplace_back(DecodeTask{plan_.compression, pending.value, result});
    }
  }
  add_task(id, state, std::move(work), std::move(pending));
}

// The next host gets the same bytes, before they are put in place here.
void Exchange::store(std::uint32_t id, const Chain& chain, State& state, const Step& step) {
  state.value = std::move(state.arrived.at(step.round));
  state.arrived.erase(step.round);
  state.encoded = plan_.compression != Compression::none;
  Work work;
  if (state.encoded) {
    work.pieces.emplace_back(DecodeTask{plan_.compression, state.value, result_of(chain)});
    if (mutant("encode_again")) {
      state.encoded = false;
      state.value = result_of(chain);
    }
  } else {
    work = SumTask{plan_.dtype, plan_.op, 1, {state.value}, result_of(chain)};
  }
  add_task(id, state, std::move(work), {id, false, true, {}, false});
  if (state.started && !schedule_.computed_by_many) came_around();
}

void Exchange::add_task(std::uint32_t id, State& state, Work work, Pending pending) {
  state.busy = pending.makes_value;
  ++state.tasks;
  const std::uint32_t task = next_task_++;
  pending.chain = id;
  pending_.emplace(task, std::move(pending));
  effects_.tasks.push_back({task, std::move(work)});
}

void Exchange::done(std::uint32_t task) {
  const auto found = pending_.find(task);
  if (found == pending_.end()) return;
  const Pending pending = std::move(found->second);
  pending_.erase(found);
  State& state = states_[pending.chain];
  --state.tasks;
  if (pending.makes_value) {
    state.value = pending.value;
    state.has_value = true;
    state.encoded = pending.encoded;
    state.busy = false;
  }
  if (pending.stores) state.stored = true;
  advance(pending.chain);
  note_in_place(pending.chain, state);
}

void Exchange::note_in_place(std::uint32_t id, State& state) {
  if (!state.stored || state.tasks != 0 || state.step < chain(id).steps.size()) return;
  state.stored = false;
  ++in_place_;
  effects_.in_place.push_back(id);
}

std::set<std::uint32_t> Exchange::waiting_for() const {
  std::set<std::uint32_t> hosts;
  for (const Chain& chain : schedule_.chains) {
    const State& state = states_[chain.id];
    if (state.step == chain.steps.size() || state.busy) continue;
    const Step& step = chain.steps[state.step];
    const bool lacks_own = step.kind != StepKind::store && !state.has_value;
    if (is_receive(step) && !lacks_own) hosts.insert(step.peer);
    if (lacks_own) hosts.insert(plan_.host);
  }
  return hosts;
}

}  // namespace moolink::collective
