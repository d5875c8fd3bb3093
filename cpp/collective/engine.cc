#include "collective/engine.h"

#include <algorithm>

namespace moolink::collective {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw Exception(ErrorCode::invalid_argument, "operation '" + name + "': " + what);
}

// Ranks of a spec: rising, each once, none beyond the last member.
void check_ranks(const std::string& name, const std::vector<std::uint32_t>& ranks,
                 std::size_t members) {
  if (!std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>()) ||
      (!ranks.empty() && ranks.back() >= members)) {
    refuse(name, "its ranks must rise and be below " + std::to_string(members));
  }
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

std::string Engine::scope_of(const wire::Payload& payload) {
  std::string scope;
  wire::Reader reader(payload.body);
  reader(scope);  // the first field of a Frame
  return scope;
}

Operation* Engine::find(const OpKey& key) {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &operations_.at(found->second);
}

void Engine::set_members(Members members, const Error& reason) {
  auto unfinished = std::exchange(operations_, {});
  by_key_.clear();
  next_number_.clear();
  members_ = std::move(members);
  rank_.reset();
  for (std::uint32_t i = 0; i < members_.instances.size(); ++i) {
    if (members_.instances[i] == config_.self) rank_ = i;
  }
  std::erase_if(early_, [this](const Early& early) {
    const bool outdated = members_.epoch != 0 && early.frame.epoch < members_.epoch;
    if (outdated) early_bytes_ -= bytes_of(early.parts);
    return outdated;
  });
  for (auto& [id, operation] : unfinished) {
    if (operation.retry()) {
      waiting_.emplace(id, operation.take_request());
    } else {
      actions_.push_back(Done{id, operation.key().name, reason, {}, {}});
    }
  }
  if (!rank_) return;
  for (auto& [id, request] : std::exchange(waiting_, {})) begin(id, std::move(request));
}

OpId Engine::start(std::string name, OpSpec spec, std::vector<Buffer> inputs, Options options) {
  if (!rank_) throw Exception(ErrorCode::closed, "operation '" + name + "': not in a group yet");
  if (!is_supported(spec.dtype, spec.op)) {
    refuse(name, op_name(spec.op) + " of " + std::string(tensor::dtype_name(spec.dtype)) +
                     " is not defined");
  }
  check_ranks(name, spec.contributors, members_.instances.size());
  check_ranks(name, spec.reducers, members_.instances.size());
  const auto& givers = spec.contributors;
  const bool contributes =
      givers.empty() || std::binary_search(givers.begin(), givers.end(), *rank_);
  if (contributes == inputs.empty()) {
    refuse(name, contributes ? "an input is missing" : "this rank must not pass an input");
  }
  for (const Buffer& input : inputs) {
    if (input.size() != spec.byte_size()) {
      refuse(name, "an input has " + std::to_string(input.size()) + " bytes, " + spec.text() +
                       " has " + std::to_string(spec.byte_size()));
    }
  }
  const OpId id = next_op_++;
  begin(id, {std::move(name), std::move(spec), std::move(inputs), options.retry, options.number});
  return id;
}

OpId Engine::start_value(std::string name, wire::Payload value, Options options) {
  if (!rank_) throw Exception(ErrorCode::closed, "operation '" + name + "': not in a group yet");
  const OpId id = next_op_++;
  begin(id, {std::move(name), std::move(value), {}, options.retry, options.number});
  return id;
}

void Engine::begin(OpId id, Operation::Request request) {
  OpKey key{request.name, 0};
  key.number = request.number ? *request.number : next_number_[request.name]++;
  if (by_key_.contains(key)) {
    refuse(key.name, "number " + std::to_string(key.number) + " is already under way");
  }
  // The mean over those who contribute; everyone computes the same divisor from the same members.
  if (auto* spec = std::get_if<OpSpec>(&request.what); spec && spec->op == ReduceOp::mean) {
    const auto& givers = spec->contributors;
    spec->divisor = static_cast<double>(givers.empty() ? members_.names.size() : givers.size());
  }
  auto [at, added] = operations_.try_emplace(
      id, id, key, std::move(request), Operation::Place{*rank_, members_.names}, *config_.memory);
  by_key_.emplace(key, id);
  at->second.begin();
  carry_out(id);
  replay_early(key);
}

void Engine::carry_out(OpId id) {
  Operation& operation = operations_.at(id);
  auto effects = operation.take_effects();
  for (auto& outgoing : effects.outgoing) {
    const std::uint32_t to = outgoing.to;
    send(to, operation.key(), std::move(outgoing));
  }
  for (auto& task : effects.tasks) actions_.push_back(Sum{id, task.slice, std::move(task.task)});
  if (effects.combine) actions_.push_back(Combine{id, std::move(*effects.combine)});
  if (!effects.finished) return;
  actions_.push_back(Done{id, operation.key().name, operation.error(),
                          operation.error() ? Buffer() : Buffer(operation.tensor()),
                          operation.error() ? wire::Payload() : operation.value()});
  by_key_.erase(operation.key());
  operations_.erase(id);
}

void Engine::send(std::uint32_t rank, const OpKey& key, Operation::Outgoing outgoing) {
  Frame frame{config_.scope, members_.epoch, key, std::move(outgoing.content)};
  actions_.push_back(Send{members_.instances[rank],
                          members_.names[rank],
                          {wire::encode(frame), std::move(outgoing.parts)}});
}

void Engine::received(const Uid& from, const wire::Payload& payload) {
  auto frame = wire::decode<Frame>(payload.body);
  if (frame.scope != config_.scope || frame.epoch < members_.epoch) return;
  Operation* operation = frame.epoch == members_.epoch ? find(frame.key) : nullptr;
  if (operation == nullptr) return keep_early(from, std::move(frame), payload.parts);
  apply(*operation, from, frame, payload.parts);
}

void Engine::apply(Operation& operation, const Uid& from, const Frame& frame,
                   const std::vector<Buffer>& parts) {
  const auto at = std::find(members_.instances.begin(), members_.instances.end(), from);
  if (at == members_.instances.end()) return;  // no member of this epoch
  const auto rank = static_cast<std::uint32_t>(at - members_.instances.begin());
  const OpId id = operation.id();
  operation.received(rank, frame.content, parts);
  carry_out(id);
}

void Engine::keep_early(const Uid& from, Frame frame, std::vector<Buffer> parts) {
  // What ended here is not begun again: a failure may cross with the operation's end.
  const auto next = next_number_.find(frame.key.name);
  if (frame.epoch == members_.epoch && next != next_number_.end() &&
      frame.key.number < next->second) {
    return;
  }
  const std::size_t bytes = bytes_of(parts);
  if (early_bytes_ + bytes > config_.early_bytes) {
    Error error;
    error.code = ErrorCode::queue_full;
    error.function = frame.key.name;
    error.message = "operation '" + frame.key.name + "': a member has not started it and holds " +
                    std::to_string(early_bytes_) + " bytes for operations that wait for it";
    frame.content = Failure{error};
    parts.clear();
    actions_.push_back(Send{from, {}, {wire::encode(frame), {}}});
  }
  early_bytes_ += bytes_of(parts);
  early_.push_back({from, std::move(frame), std::move(parts)});
}

void Engine::replay_early(const OpKey& key) {
  for (auto at = early_.begin(); at != early_.end();) {
    if (at->frame.epoch != members_.epoch || at->frame.key != key) {
      ++at;
      continue;
    }
    const Early early = std::move(*at);
    at = early_.erase(at);
    early_bytes_ -= bytes_of(early.parts);
    if (Operation* operation = find(key)) {
      apply(*operation, early.instance, early.frame, early.parts);
    }
  }
}

void Engine::summed(OpId op, std::uint32_t slice) {
  const auto found = operations_.find(op);
  if (found == operations_.end()) return;
  found->second.summed(slice);
  carry_out(op);
}

void Engine::combined(OpId op, std::variant<wire::Payload, Error> result) {
  const auto found = operations_.find(op);
  if (found == operations_.end()) return;
  found->second.combined(std::move(result));
  carry_out(op);
}

void Engine::cancel(OpId op, Error error) {
  if (waiting_.erase(op) != 0) {
    actions_.push_back(Done{op, error.function, std::move(error), {}, {}});
    return;
  }
  const auto found = operations_.find(op);
  if (found == operations_.end()) return;
  found->second.fail(std::move(error));
  carry_out(op);
}

std::vector<std::string> Engine::waiting_for(OpId op) const {
  const auto found = operations_.find(op);
  return found == operations_.end() ? std::vector<std::string>() : found->second.waiting_for();
}

}  // namespace moolink::collective
