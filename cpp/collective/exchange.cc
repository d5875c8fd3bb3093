#include "collective/exchange.h"

#include <algorithm>

#include "tensor/dtype.h"

namespace moolink::collective {
namespace {

using StepKind = Step::Kind;

bool is_receive(const Step& step) {
  return step.kind == StepKind::reduce || step.kind == StepKind::store;
}

}  // namespace

Exchange::Exchange(Plan plan, MutableBuffer result, MutableBuffer residual, Allocator& memory)
    : plan_(std::move(plan)),
      result_(std::move(result)),
      residual_(std::move(residual)),
      memory_(memory),
      item_size_(tensor::item_size(plan_.dtype)),
      partial_size_(tensor::item_size(partial_dtype(plan_.dtype))) {
  // Several hosts then encode the same elements, and each would round them differently.
  if (plan_.schedule != Schedule::tree) plan_.compression = Compression::none;
  std::uint32_t root = plan_.first % plan_.hosts;
  for (const Range& range : plan_.chains) {
    Chain& chain = chains_.emplace_back();
    chain.range = range;
    chain.steps = steps_of(plan_.schedule, plan_.hosts, plan_.host, root);
    root = (root + 1) % plan_.hosts;
  }
}

void Exchange::provide(std::uint32_t chain, Buffer partial) {
  chains_[chain].value = std::move(partial);
  chains_[chain].lent = plan_.lent;
  advance(chain);
}

std::size_t Exchange::travelling_size(const Chain& chain, bool partial) const {
  const std::uint64_t count = chain.range.count();
  if (compresses()) return encoded_size(plan_.compression, count);
  return count * (partial ? partial_size_ : item_size_);
}

bool Exchange::received(std::uint32_t host, std::uint32_t id, std::uint32_t round,
                        Buffer elements) {
  if (id >= chains_.size()) return false;
  Chain& chain = chains_[id];
  const auto step = std::find_if(
      chain.steps.begin() + static_cast<std::ptrdiff_t>(chain.step), chain.steps.end(),
      [&](const Step& s) { return is_receive(s) && s.peer == host && s.round == round; });
  if (step == chain.steps.end() || chain.arrived.contains(round) ||
      elements.size() != travelling_size(chain, step->kind == StepKind::reduce)) {
    return false;
  }
  chain.arrived.emplace(round, std::move(elements));
  advance(id);
  return true;
}

void Exchange::advance(std::uint32_t id) {
  Chain& chain = chains_[id];
  while (!chain.busy && chain.step < chain.steps.size() && do_step(id, chain)) {
  }
  if (!chain.result || chain.tasks != 0 || chain.step < chain.steps.size()) return;
  chain.value.reset();
  effects_.results.push_back({id, *std::exchange(chain.result, std::nullopt)});
}

// Returns whether the step was done or begun; a task that makes the next value leaves `busy` set.
bool Exchange::do_step(std::uint32_t id, Chain& chain) {
  const Step& step = chain.steps[chain.step];
  if (!chain.value) return false;
  if (is_receive(step) && !chain.arrived.contains(step.round)) return false;
  switch (step.kind) {
    case StepKind::send:
      return send(id, chain, step);
    case StepKind::reduce:
      reduce(id, chain, step);
      break;
    case StepKind::finish:
      finish(id, chain);
      break;
    case StepKind::store:
      store(id, chain, step);
      break;
  }
  ++chain.step;
  return true;
}

bool Exchange::send(std::uint32_t id, Chain& chain, const Step& step) {
  if (compresses() && !chain.encoded) {
    Work work;
    Pending pending{id, encode(chain, *chain.value, work), true, {}};
    add_task(chain, std::move(work), std::move(pending));
    return true;  // and send in the same step, once it is encoded
  }
  if (chain.lent) {
    SumTask copy = sum_task({*chain.value});
    copy.output = memory_.allocate(chain.value->size());
    Pending pending{id, copy.output, false, {}};
    add_task(chain, std::move(copy), std::move(pending));
    return true;  // the same
  }
  effects_.outgoing.push_back({step.peer, id, step.round, *chain.value});
  ++chain.step;
  return true;
}

SumTask Exchange::sum_task(std::vector<Buffer> inputs) const {
  SumTask task{plan_.dtype, plan_.op, 1, std::move(inputs), {}};
  task.partial_inputs = task.partial_output = true;
  return task;
}

// Makes it the last task: from the sum of all hosts to the stored elements.
void Exchange::make_final(const Chain& chain, SumTask& task) const {
  task.divisor = plan_.divisor;
  task.partial_output = false;
  task.canonical_nan = plan_.schedule == Schedule::doubling && plan_.hosts > 1;
  task.output = result_of(chain);
}

MutableBuffer Exchange::result_of(const Chain& chain) const {
  const std::size_t bytes = chain.range.count() * item_size_;
  return result_.empty() ? memory_.allocate(bytes)
                         : result_.slice(chain.range.begin * item_size_, bytes);
}

// Adds the encoding of a float32 value to `work`, and returns its output.
Buffer Exchange::encode(const Chain& chain, const Buffer& value, Work& work) const {
  EncodeTask task{plan_.compression, value, {}, {}};
  task.output = memory_.allocate(encoded_size(plan_.compression, chain.range.count()));
  if (!residual_.empty()) {
    task.residual =
        residual_.slice(chain.range.begin * sizeof(float), chain.range.count() * sizeof(float));
  }
  Buffer encoded = task.output;
  work.pieces.emplace_back(std::move(task));
  return encoded;
}

void Exchange::reduce(std::uint32_t id, Chain& chain, const Step& step) {
  Buffer theirs = std::move(chain.arrived.at(step.round));
  chain.arrived.erase(step.round);
  Work work;
  if (compresses()) {
    DecodeTask decode{plan_.compression, std::move(theirs), {}};
    decode.output = memory_.allocate(chain.range.count() * sizeof(float));
    theirs = decode.output;
    work.pieces.emplace_back(std::move(decode));
  }
  std::vector<Buffer> inputs{*chain.value, theirs};
  if (step.theirs_first) std::swap(inputs[0], inputs[1]);
  SumTask task = sum_task(std::move(inputs));
  Pending pending{id, {}, false, {}};
  const bool is_last = chain.steps[chain.step + 1].kind == StepKind::finish;
  if (is_last && !compresses()) {  // in one pass
    make_final(chain, task);
    pending.result = task.output;
    ++chain.step;
  } else {
    task.output = memory_.allocate(chain.range.count() * partial_size_);
  }
  pending.value = task.output;
  work.pieces.emplace_back(std::move(task));
  add_task(chain, std::move(work), std::move(pending));
}

// The sum of all hosts becomes the result. The root keeps compressed elements as the others
// get them.
void Exchange::finish(std::uint32_t id, Chain& chain) {
  SumTask task = sum_task({*chain.value});
  make_final(chain, task);
  const MutableBuffer result = task.output;
  Work work;
  work.pieces.emplace_back(std::move(task));
  Pending pending{id, result, false, result};
  if (compresses() && plan_.hosts > 1) {
    pending.value = encode(chain, result, work);
    pending.encoded = true;
    work.pieces.emplace_back(DecodeTask{plan_.compression, *pending.value, result});
  }
  add_task(chain, std::move(work), std::move(pending));
}

// The next host gets the same bytes.
void Exchange::store(std::uint32_t id, Chain& chain, const Step& step) {
  chain.value = std::move(chain.arrived.at(step.round));
  chain.arrived.erase(step.round);
  if (!compresses()) {
    chain.result = chain.value;
    return;
  }
  const MutableBuffer decoded = result_of(chain);
  Pending pending{id, {}, false, decoded};
  add_task(chain, DecodeTask{plan_.compression, *chain.value, decoded}, std::move(pending));
  chain.encoded = true;
}

void Exchange::add_task(Chain& chain, Work work, Pending pending) {
  chain.busy = pending.value.has_value();
  ++chain.tasks;
  const std::uint32_t task = next_task_++;
  pending_.emplace(task, std::move(pending));
  effects_.tasks.push_back({task, std::move(work)});
}

void Exchange::done(std::uint32_t task) {
  const auto found = pending_.find(task);
  if (found == pending_.end()) return;
  Pending pending = std::move(found->second);
  pending_.erase(found);
  Chain& chain = chains_[pending.chain];
  --chain.tasks;
  if (pending.value) {
    chain.value = std::move(pending.value);
    chain.encoded = pending.encoded;
    chain.lent = false;
    chain.busy = false;
  }
  if (pending.result) chain.result = std::move(pending.result);
  advance(pending.chain);
}

std::set<std::uint32_t> Exchange::waiting_for() const {
  std::set<std::uint32_t> hosts;
  for (const Chain& chain : chains_) {
    const auto next = std::find_if(
        chain.steps.begin() + static_cast<std::ptrdiff_t>(chain.step), chain.steps.end(),
        [&](const Step& s) { return is_receive(s) && !chain.arrived.contains(s.round); });
    if (next == chain.steps.end()) continue;
    const bool lacks_own = !chain.value && !chain.busy;  // then the others wait for this host
    if (!lacks_own) hosts.insert(next->peer);
  }
  return hosts;
}

}  // namespace moolink::collective
