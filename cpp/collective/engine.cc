#include "collective/engine.h"

#include <algorithm>
#include <iterator>

#include "base/names.h"

namespace moolink::collective {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Exception(ErrorCode::invalid_argument, "operation '" + name + "': " + what);
}

// Ranks of a spec: rising, each once, none beyond the last member.
void check_ranks(const std::string& name, const std::vector<std::uint32_t>& ranks,
                 std::size_t members) {
  if (!std::ranges::is_sorted(ranks, std::less_equal<>()) ||
      (!ranks.empty() && ranks.back() >= members)) {
    refuse(name, "its ranks must rise and be below " + std::to_string(members));
  }
}

// Parts of an operation of several dtypes share its name, with a number.
constexpr std::size_t kLongestName = kMaxName + 64;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;  // of one member's memory
constexpr std::size_t kMostResiduals = 64;                    // names that compress

constexpr std::size_t kEarlyOverhead = 512;  // of a frame that waits, in memory

// The frame, the key it is stored under and its log text contain the name.
std::size_t note_cost(const Frame& frame) {
  return kEarlyOverhead + frame.scope.size() + 5 * frame.key.name.size();
}

Error too_much_early(const std::string& operation, std::size_t bytes) {
  return {.code = ErrorCode::queue_full,
          .message = "operation '" + operation + "': a member has not started it and holds " +
                     std::to_string(bytes) + " bytes for operations that wait for it",
          .function = operation};
}

std::size_t bytes_of(const std::vector<Buffer>& parts) {
  std::size_t bytes = 0;
  for (const Buffer& part : parts) bytes += part.size();
  return bytes;
}

}  // namespace

Engine::Engine(Config config) : config_(std::move(config)) {
  if (!config_.memory) config_.memory = std::make_shared<HeapAllocator>();
}

Operation* Engine::find(OpId id) {
  const auto found = operations_.find(id);
  return found == operations_.end() ? nullptr : &found->second;
}

Operation* Engine::find(OpId id, RunId run) {
  Operation* operation = find(id);
  return operation != nullptr && operation->run() == run ? operation : nullptr;
}

Operation* Engine::find(const OpKey& key) {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : find(found->second);
}

void Engine::set_members(SharedMembers members, const Error& reason) {
  auto unfinished = std::exchange(operations_, {});
  by_key_.clear();
  shared_ready_ = false;
  last_shared_ = last_passed_ = 0;
  passes_.clear();
  unsettled_.clear();
  starts_.clear();
  members_ = std::move(members);
  rank_ = members_->rank_of(config_.self);
  residuals_.clear();
  drop_outdated_early();
  for (auto& [id, operation] : unfinished) {
    if (operation.ending()) {
      ending_.emplace(id, std::move(operation));
    } else if (operation.retry()) {
      waiting_.emplace(id, operation.take_request());
    } else {
      actions_.push_back(Done{id, operation.key().name, reason, {}, {}});
    }
  }
  if (!rank_) return;
  for (auto& [id, request] : std::exchange(waiting_, {})) begin(id, std::move(request));
}

void Engine::drop_operations() {
  operations_.clear();
  by_key_.clear();
  waiting_.clear();
  ending_.clear();
  passes_.clear();
  early_.clear();
  early_bytes_ = 0;
  actions_.clear();
}

OpId Engine::start(std::string name, OpSpec spec, std::vector<Buffer> inputs, Options options) {
  require_rank(name);
  if (reduces(spec.kind) && !is_supported(spec.dtype, spec.op)) {
    refuse(name, op_name(spec.op) + " of " + std::string(tensor::dtype_name(spec.dtype)) +
                     " is not defined");
  }
  if (spec.compression != Compression::none &&
      (spec.dtype != tensor::DType::float32 || !spec.adds())) {
    refuse(name, "compression is for sums and means of float32");
  }
  check_ranks(name, spec.contributors, members_->size());
  if (!spec.contributors.empty() && !spec.adds()) {  // the others reduce zeros
    refuse(name, "only a sum or a mean is of some members");
  }
  const bool contributes = spec.contributes(*rank_);
  if (contributes == inputs.empty()) {
    refuse(name, contributes ? "an input is missing" : "this rank must not pass an input");
  }
  if (spec.root >= members_->size()) {
    refuse(name, "there is no rank " + std::to_string(spec.root) + " to be the root");
  }
  if (spec.byte_size() > kMostBytes / members_->size()) refuse(name, "it is too large");
  const Passage passage = spec.passage(members_->size());
  const auto check_size = [&](const char* what, std::uint64_t bytes, std::uint64_t wanted) {
    if (bytes == wanted) return;
    refuse(name, std::string(what) + " has " + std::to_string(bytes) + " bytes, " + spec.text() +
                     " needs " + std::to_string(wanted));
  };
  for (const Buffer& input : inputs) {
    check_size("an input", input.size(), input_bytes(passage, *rank_));
  }
  if (options.output) {
    check_size("the output", options.output->size(), output_bytes(passage, *rank_));
  }
  const OpId id = next_op_++;
  begin(id, {std::move(name), std::move(spec), std::move(inputs), std::move(options)});
  return id;
}

OpId Engine::start_value(std::string name, wire::Payload value, Options options) {
  require_rank(name);
  const OpId id = next_op_++;
  begin(id, {std::move(name), std::move(value), {}, std::move(options)});
  return id;
}

void Engine::begin(OpId id, Operation::Request request) {
  if (request.name.size() > kLongestName) {
    refuse(request.name.substr(0, 40) + "...",
           "its name has more than " + std::to_string(kLongestName) + " bytes");
  }
  OpKey key{request.name, 0};
  const std::optional<std::uint64_t>& number = request.options.number;
  key.number = number ? *number : starts_.start(request.name);
  if (by_key_.contains(key)) {
    refuse(key.name, "number " + std::to_string(key.number) + " is already under way");
  }
  // The mean over the contributors; all members compute the same divisor from the same members.
  if (auto* spec = std::get_if<OpSpec>(&request.what); spec && spec->op == ReduceOp::mean) {
    const auto& givers = spec->contributors;
    spec->divisor = static_cast<double>(givers.empty() ? members_->size() : givers.size());
  }
  Operation::Place place{*rank_, members_};
  if (const auto* spec = std::get_if<OpSpec>(&request.what)) {
    place.residual = take_residual(key.name, *spec);
  }
  auto [at, added] = operations_.try_emplace(id, id, next_run_++, key, std::move(request),
                                             std::move(place), *config_.memory);
  Operation& operation = at->second;
  guarded(id, [&] {
    by_key_.emplace(key, id);
    operation.begin();
    carry_out(id);
    replay_early(key);
  });
}

// Of several operations of one name under way, the first has the residual.
MutableBuffer Engine::take_residual(const std::string& name, const OpSpec& spec) {
  const Hosts& hosts = members_->hosts;
  if (spec.compression == Compression::none || spec.kind != Kind::all_reduce || hosts.count() < 2 ||
      (hosts.share_memory() && !hosts.lane(*rank_))) {
    return {};
  }
  const auto found =
      std::ranges::find_if(residuals_, [&](const auto& entry) { return entry.first == name; });
  MutableBuffer residual;
  if (found != residuals_.end()) {
    residual = std::move(found->second);
    residuals_.erase(found);
  }
  if (residual.size() != spec.byte_size()) {
    residual = config_.memory->allocate(spec.byte_size());
    std::fill_n(residual.data(), residual.size(), std::byte{0});
  }
  return residual;
}

void Engine::keep_residual(const Operation& operation) {
  if (operation.residual().empty() || operation.error()) return;
  residuals_.emplace_back(operation.key().name, operation.residual());
  if (residuals_.size() > kMostResiduals) residuals_.pop_front();
}

void Engine::carry_out(OpId id) {
  Operation& operation = operations_.at(id);
  auto effects = operation.take_effects();
  for (auto& outgoing : effects.outgoing) {
    const std::uint32_t to = outgoing.to;
    send(to, operation.key(), std::move(outgoing));
  }
  const RunId run = operation.run();
  for (auto& task : effects.tasks) {
    actions_.push_back(Sum{id, run, task.id, std::move(task.work)});
  }
  if (effects.combine) actions_.push_back(Combine{id, run, std::move(*effects.combine)});
  if (effects.pass) pass(*effects.pass, *operation.spec(), &operation);
  for (auto& result : effects.publish) {
    actions_.push_back(Publish{id, operation.shared(), result.chain, std::move(result.elements)});
  }
  if (effects.abandon) {
    const auto waiting = passes_.find(*effects.abandon);
    if (waiting == passes_.end()) {
      actions_.push_back(Abandon{*effects.abandon});
    } else {
      waiting->second.operation.inputs.clear();
      waiting->second.operation.output = {};
      waiting->second.operation.abandoned = true;
    }
  }
  if (effects.ready_to_go) {
    operation.go(shared_ready_ && operation.may_share() ? ++last_shared_ : 0);
    return carry_out(id);
  }
  if (effects.finished) finish(id, operation, effects.unsettled);
}

void Engine::finish(OpId id, Operation& operation, bool unsettled) {
  keep_residual(operation);
  if (unsettled) unsettled_.emplace(operation.key(), *operation.spec());
  actions_.push_back(Done{id, operation.key().name, operation.error(),
                          operation.error() ? Buffer() : Buffer(operation.tensor()),
                          operation.error() ? wire::Payload() : operation.value()});
  by_key_.erase(operation.key());
  operations_.erase(id);
}

// --- through shared memory

// Go messages of rank 0 may overtake one another; the pipeline gets operations in order. An
// operation that has ended here passes through without memory.
void Engine::pass(std::uint64_t s, const OpSpec& spec, const Operation* operation) {
  if (s <= last_passed_ || passes_.contains(s)) return;
  PipelineOperation next = Operation::pipeline_operation(spec, *members_, *rank_);
  next.s = s;
  next.abandoned = operation == nullptr || operation->error();
  if (!next.abandoned) {
    next.inputs = operation->request().inputs;
    next.written = operation->request().options.written;
    next.output = operation->tensor();
  }
  passes_.emplace(s, Pass{std::move(next)});
  for (auto at = passes_.begin(); at != passes_.end() && at->first == last_passed_ + 1;) {
    ++last_passed_;
    actions_.push_back(std::move(at->second));
    at = passes_.erase(at);
  }
}

// Operations pass roughly in the order of their start, so this search ends early.
Operation* Engine::passing(std::uint64_t s) {
  const auto found = std::ranges::find_if(
      operations_, [s](const auto& entry) { return entry.second.shared() == s; });
  return found == operations_.end() ? nullptr : &found->second;
}

void Engine::passed(std::uint64_t s) {
  tell(passing(s), [](Operation& operation) { operation.passed(); });
}

void Engine::summed_here(SharedPipeline::Sum sum) {
  tell(passing(sum.s),
       [&](Operation& operation) { operation.summed_here(sum.chunk, std::move(sum.elements)); });
}

// Rank 0's message on an operation that has ended here without it.
bool Engine::settle(const Uid& from, const Frame& frame) {
  const auto found = unsettled_.find(frame.key);
  if (found == unsettled_.end() || from != (*members_)[0].instance) return false;
  const auto* go = std::get_if<Go>(&frame.content);
  const auto* failure = std::get_if<Failure>(&frame.content);
  if (go == nullptr && failure == nullptr) return false;
  const std::uint64_t s = go != nullptr ? go->shared : failure->shared;
  if (s != 0) pass(s, found->second, nullptr);
  unsettled_.erase(found);
  return true;
}

void Engine::send(std::uint32_t rank, const OpKey& key, Operation::Outgoing outgoing) {
  Frame frame{config_.scope, members_->epoch, key, std::move(outgoing.content)};
  actions_.push_back(Send{(*members_)[rank].instance,
                          (*members_)[rank].name,
                          {wire::encode(frame), std::move(outgoing.parts)}});
}

void Engine::received(const Uid& from, const wire::Payload& payload) {
  auto frame = wire::decode<Frame>(payload.body);
  if (frame.key.name.size() > kLongestName) wire::fail("an operation's name exceeds the limit");
  if (frame.scope != config_.scope || frame.epoch < members_->epoch) return;
  Operation* operation = frame.epoch == members_->epoch ? find(frame.key) : nullptr;
  if (operation == nullptr && frame.epoch == members_->epoch && settle(from, frame)) return;
  if (operation == nullptr) return keep_early(from, std::move(frame), payload);
  apply(*operation, from, frame, payload.parts);
}

void Engine::apply(Operation& operation, const Uid& from, const Frame& frame,
                   const std::vector<Buffer>& parts) {
  const auto rank = members_->rank_of(from);
  if (!rank) return;  // no member of this epoch
  const OpId id = operation.id();
  operation.received(*rank, frame.content, parts);
  carry_out(id);
}

void Engine::keep_early(const Uid& from, Frame frame, const wire::Payload& payload) {
  if (frame.epoch == members_->epoch) {
    // An operation that ended here does not begin again: a failure may cross with its end.
    const bool ended = frame.key.number < starts_.started(frame.key.name);
    if (ended || !members_->rank_of(from)) return;
  }
  const auto* failure = std::get_if<Failure>(&frame.content);
  bool fails = failure != nullptr && !failure->asks_why;
  Early early{from, std::move(frame), {}, 0};
  if (!fails) early.parts = payload.parts;
  early.bytes = payload.body.size() + bytes_of(early.parts) + note_cost(early.frame);
  const bool is_full = early_bytes_ + early.bytes > config_.early_bytes;
  if (is_full && !fails) {
    fails = true;
    early.frame.content = Failure{too_much_early(early.frame.key.name, early_bytes_)};
    early.parts.clear();
    early.bytes = note_cost(early.frame);
    if (early_bytes_ + early.bytes > 2 * config_.early_bytes) return;  // not answered either
    actions_.push_back(Send{from, {}, {wire::encode(early.frame), {}}});
  }
  // Failure notes have some room of their own, so that an operation that failed elsewhere fails
  // here.
  if (early_bytes_ + early.bytes > 2 * config_.early_bytes) return;
  EarlyFrames& kept = early_[{early.frame.epoch, early.frame.key}];
  if (fails && !std::exchange(kept.failed, true)) drop_early_data(kept);
  if (kept.failed && !fails && !std::holds_alternative<Go>(early.frame.content)) return;
  early_bytes_ += early.bytes;
  kept.frames.push_back(std::move(early));
}

// Keeps rank 0's Go: it decides whether this member must pass the operation through the pipeline.
void Engine::drop_early_data(EarlyFrames& early) {
  std::erase_if(early.frames, [this](const Early& one) {
    if (std::holds_alternative<Go>(one.frame.content)) return false;
    early_bytes_ -= one.bytes;
    return true;
  });
}

void Engine::drop_outdated_early() {
  if (members_->epoch == 0) return;
  for (auto at = early_.begin(); at != early_.end() && at->first.first <= members_->epoch;) {
    const bool outdated = at->first.first < members_->epoch;
    std::erase_if(at->second.frames, [&](const Early& one) {
      if (!outdated && members_->rank_of(one.instance)) return false;
      early_bytes_ -= one.bytes;
      return true;
    });
    at = at->second.frames.empty() ? early_.erase(at) : std::next(at);
  }
}

void Engine::replay_early(const OpKey& key) {
  const auto found = early_.extract({members_->epoch, key});
  if (found.empty()) return;
  for (const Early& early : found.mapped().frames) {
    early_bytes_ -= early.bytes;
    if (Operation* operation = find(key)) {
      apply(*operation, early.instance, early.frame, early.parts);
    } else {
      settle(early.instance, early.frame);
    }
  }
}

void Engine::inputs_written() {
  std::vector<OpId> ids;  // an operation may end
  for (const auto& [id, operation] : operations_) ids.push_back(id);
  for (const OpId id : ids) tell(find(id), [](Operation& one) { one.inputs_written(); });
}

void Engine::summed(OpId op, RunId run, std::uint32_t task) {
  if (const auto old = ending_.find(op); old != ending_.end()) {
    if (old->second.run() != run || task != kResult) return;
    const Operation& operation = old->second;
    actions_.push_back(Done{op, operation.key().name, {}, Buffer(operation.tensor()), {}});
    ending_.erase(old);
    return;
  }
  tell(find(op, run), [&](Operation& operation) { operation.done(task); });
}

void Engine::combined(OpId op, RunId run, std::variant<wire::Payload, Error> result) {
  tell(find(op, run), [&](Operation& operation) { operation.combined(std::move(result)); });
}

void Engine::cancel(OpId op, Error error) {
  if (waiting_.erase(op) != 0) {
    actions_.push_back(Done{op, error.function, std::move(error), {}, {}});
    return;
  }
  Operation* operation = find(op);
  if (operation == nullptr) return;
  operation->fail(std::move(error));
  carry_out(op);
}

bool Engine::ask_why(OpId op, const Error& error) {
  Operation* operation = find(op);
  if (operation == nullptr || !operation->ask_why(error)) return false;
  carry_out(op);
  return true;
}

std::vector<std::string> Engine::waiting_for(OpId op) const {
  const auto found = operations_.find(op);
  return found == operations_.end() ? std::vector<std::string>() : found->second.waiting_for();
}

std::map<std::string, std::vector<std::string>> Engine::begun_elsewhere() const {
  std::map<std::string, std::vector<std::string>> operations;
  for (const auto& [at, kept] : early_) {
    if (at.first != members_->epoch) continue;
    std::vector<std::string>& names = operations[at.second.name];
    for (std::size_t rank = 0; rank < members_->size(); ++rank) {
      const bool began = std::ranges::any_of(kept.frames, [&](const Early& early) {
        return early.instance == (*members_)[rank].instance;
      });
      if (began) names.push_back((*members_)[rank].name);
    }
  }
  return operations;
}

}  // namespace moolink::collective
