#include "collective/operation.h"

#include <algorithm>

namespace moolink::collective {
namespace {

// A payload as parts of a message, and back: the body is the first.
std::vector<Buffer> to_parts(const wire::Payload& payload) {
  std::vector<Buffer> parts{payload.body};
  parts.insert(parts.end(), payload.parts.begin(), payload.parts.end());
  return parts;
}

wire::Payload from_parts(const std::vector<Buffer>& parts) {
  wire::Payload payload;
  if (parts.empty()) return payload;
  payload.body = private_copy(parts.front());  // read here later; its sender may still write
  payload.parts.assign(parts.begin() + 1, parts.end());
  return payload;
}

}  // namespace

Operation::Operation(OpId id, RunId run, OpKey key, Request request, Place place, Allocator& memory)
    : id_(id),
      run_(run),
      key_(std::move(key)),
      request_(std::move(request)),
      place_(std::move(place)),
      memory_(memory) {
  if (spec() == nullptr) return;
  item_size_ = tensor::item_size(spec()->dtype);
  passage_ = spec()->passage(members().size());
  asks_ = request_.options.shared == 0 && must_ask();
}

// The same at all members: it depends on the members and the spec, which they compare.
bool Operation::must_ask() const {
  if (!is_all_reduce()) return true;
  const bool on_one_host = members().one_host && members().size() > 1 && has_output();
  return spec()->contributors.empty() && (on_one_host || shares_hosts()) &&
         spec()->byte_size() >= kSharedBytes;
}

void Operation::begin() {
  if (spec() == nullptr) {
    const auto& value = std::get<wire::Payload>(request_.what);
    if (place_.rank == 0) {
      value_arrived(0, to_parts(value));
    } else {
      effects_.outgoing.push_back({0, Value{}, to_parts(value)});
    }
    return;
  }
  if (request_.options.shared != 0) {
    use_shared_memory(request_.options.shared);
  } else if (!asks_) {
    use_messages();
  } else if (place_.rank == 0) {
    started(0, *spec());
  } else {
    effects_.outgoing.push_back({0, Started{*spec()}, {}});
  }
}

void Operation::started(std::uint32_t from, const OpSpec& theirs) {
  if (place_.rank != 0 || !asks_) {
    return refuse(from, "only one of them asks rank 0 to begin it");
  }
  if (theirs != *spec()) return refuse(from, difference(from, theirs));
  started_.insert(from);
  if (!went_ && started_.size() == members().size()) effects_.ready_to_go = true;
}

void Operation::go(std::uint64_t shared) {
  if (went_ || !asks_ || error_) return;
  went_ = true;
  if (place_.rank == 0) to_others(Go{shared}, {});
  if (shared == 0) return use_messages();
  use_shared_memory(shared);
}

void Operation::use_shared_memory(std::uint64_t number) {
  shared_ = number;
  if (!has_output()) result_ = memory_.allocate(output_bytes(passage_, place_.rank));
  if (!shares_hosts()) {
    effects_.pass = number;
    return;
  }
  if (!is_guest()) effects_.pass = number;
  begin_exchange();
}

void Operation::use_messages() {
  uses_messages_ = true;
  if (is_all_reduce()) {
    // A retry gives the same memory to the next run, while a task of this run may still write.
    const std::uint32_t host = hosts().of[place_.rank];
    in_place_ = has_output() && !request_.options.retry && !in_trees() &&
                hosts().guests[host].empty() && !is_guest() &&
                !sends_result(steps_of(schedule(), hosts().count(), host, 0));
  } else if (reduces(passage_.kind)) {
    have_.assign(1, 0);
  } else {
    for (std::uint32_t from = 0; from < passage_.ranks; ++from) {
      have_.push_back(passes(passage_, from, place_.rank) ? 0 : 2);
    }
  }
  result_ =
      in_place_ ? *request_.options.output : memory_.allocate(output_bytes(passage_, place_.rank));
  gather_own_inputs();
}

// Makes the input that is sent: in the partial dtype, and outside the user's memory, if needed.
void Operation::gather_own_inputs() {
  const std::vector<Buffer>& inputs = request_.inputs;
  const std::size_t item_size = is_all_reduce() ? partial_size() : item_size_;
  if (inputs.empty()) {
    if (is_all_reduce() && !is_guest()) {  // the others expect elements from every member
      const MutableBuffer zeros = memory_.allocate(spec()->count() * item_size);
      std::fill_n(zeros.data(), zeros.size(), std::byte{0});
      input_ = zeros;
    }
    return send_own_inputs();
  }
  // Along trees a chain is copied when it is sent, if at all.
  const bool copies = request_.options.lent && (!is_all_reduce() || !in_trees());
  const bool as_it_is = inputs.size() == 1 && !copies && item_size == item_size_;
  // Along trees, a chain is provided once it is written. All else needs the complete inputs first.
  awaits_inputs_ =
      (!as_it_is || !in_trees()) && !request_.options.written.reaches(inputs.front().size());
  if (awaits_inputs_) return;
  if (as_it_is) {
    input_ = inputs.front();
    return send_own_inputs();
  }
  SumTask task{spec()->dtype, ReduceOp::sum, 1, inputs, {}};
  task.partial_output = item_size != item_size_;
  task.output = sum_of_inputs_ = memory_.allocate(inputs.front().size() / item_size_ * item_size);
  effects_.tasks.push_back({kOwnInputs, std::move(task)});
}

void Operation::inputs_written() {
  if (effects_.finished || error_) return;
  if (awaits_inputs_) return gather_own_inputs();
  if (exchange_ && shared_ == 0) provide_written();
}

void Operation::send_own_inputs() { is_all_reduce() ? begin_exchange() : send_pieces(); }

void Operation::send_pieces() {
  for (std::uint32_t to = 0; to < passage_.ranks; ++to) {
    if (!passes(passage_, place_.rank, to)) continue;
    const Range range = sent_bytes(passage_, place_.rank, to);
    const Buffer bytes = input_.slice(range.begin, range.count());
    if (to == place_.rank) {
      pieces_[to] = bytes;
    } else {
      effects_.outgoing.push_back({to, Piece{*spec()}, {bytes}});
    }
  }
  sent_ = true;
  std::vector<std::uint32_t> here;  // others' may arrive before this member begins
  for (const auto& [from, bytes] : pieces_) here.push_back(from);
  for (const std::uint32_t from : here) place_piece(from);
  finish_when_complete();
}

// A piece of any collective but allreduce goes straight to its place, or is reduced there.
void Operation::place_piece(std::uint32_t from) {
  if (reduces(passage_.kind)) {
    if (have_[0] != 0 || pieces_.size() != passage_.ranks) return;
    SumTask task{spec()->dtype, spec()->op, spec()->divisor, {}, result_};
    for (auto& [rank, bytes] : pieces_) task.inputs.push_back(bytes);
    have_[0] = 1;
    effects_.tasks.push_back({0, std::move(task)});
    return;
  }
  if (have_[from] != 0) return;
  have_[from] = 1;
  const Range place = placed_bytes(passage_, from, place_.rank);
  put(from, pieces_.at(from), result_.slice(place.begin, place.count()));
}

void Operation::received(std::uint32_t from, const decltype(Frame::content)& content,
                         const std::vector<Buffer>& parts) {
  if (effects_.finished || error_) return;
  if (const auto* failed = std::get_if<Failure>(&content)) return failed_elsewhere(from, *failed);
  const bool for_values =
      std::holds_alternative<Value>(content) || std::holds_alternative<Combined>(content);
  if (for_values != (spec() == nullptr)) {
    return refuse(from, "one of them reduces a tensor and the other a value");
  }
  if (const auto* theirs = std::get_if<Piece>(&content)) {
    piece(from, theirs->spec, parts);
  } else if (const auto* start = std::get_if<Started>(&content)) {
    started(from, start->spec);
  } else if (const auto* word = std::get_if<Go>(&content)) {
    if (from == 0) go(word->shared);
  } else if (const auto* elements = std::get_if<Portion>(&content)) {
    portion(from, *elements, parts);
  } else if (std::holds_alternative<Value>(content)) {
    value_arrived(from, parts);
  } else if (from == 0) {
    value_ = from_parts(parts);
    effects_.finished = true;
  }
}

void Operation::piece(std::uint32_t from, const OpSpec& theirs, const std::vector<Buffer>& parts) {
  if (theirs != *spec()) return refuse(from, difference(from, theirs));
  if (is_all_reduce() || !passes(passage_, from, place_.rank) || parts.size() != 1 ||
      parts[0].size() != placed_bytes(passage_, from, place_.rank).count()) {
    return refuse(from, name_of(from) + " sent elements that have no place here");
  }
  pieces_.emplace(from, parts[0]);
  if (sent_) place_piece(from);
}

void Operation::done(std::uint32_t task) {
  if (effects_.finished || error_) return;
  if (task == kResult) {
    effects_.finished = true;
    return;
  }
  if (task == kOwnInputs) {
    input_ = sum_of_inputs_;
    return send_own_inputs();
  }
  if (exchange_ && is_of_exchange(task)) {
    exchange_->done(task / 2);
    return take_exchange_effects();
  }
  const std::uint32_t part = exchange_ ? task / 2 : task;
  if (part >= have_.size() || have_[part] != 1) return;
  have_[part] = 2;
  finish_when_complete();
}

void Operation::finish_when_complete() {
  const bool complete = std::ranges::all_of(have_, [](auto have) { return have == 2; });
  if (!complete || effects_.finished || ending_) return;
  if (!has_output() || in_place_ || result_.empty()) {
    effects_.finished = true;
    return;
  }
  // The result here may still be being sent to others.
  ending_ = true;
  put(kResult, result_, *request_.options.output);
}

void Operation::value_arrived(std::uint32_t from, const std::vector<Buffer>& parts) {
  if (place_.rank != 0) return refuse(from, "a value was sent to another rank than 0");
  values_.emplace(from, from_parts(parts));
  if (values_.size() != members().size()) return;
  std::vector<wire::Payload> in_rank_order;
  for (auto& [rank, value] : values_) in_rank_order.push_back(std::move(value));
  values_.clear();
  effects_.combine = std::move(in_rank_order);
}

void Operation::combined(std::variant<wire::Payload, Error> result) {
  if (effects_.finished || error_) return;
  if (auto* error = std::get_if<Error>(&result)) return fail(std::move(*error));
  value_ = std::move(std::get<wire::Payload>(result));
  to_others(Combined{}, to_parts(value_));
  effects_.finished = true;
}

void Operation::to_others(const decltype(Frame::content)& content,
                          const std::vector<Buffer>& parts) {
  for (std::uint32_t rank = 0; rank < members().size(); ++rank) {
    if (rank != place_.rank) effects_.outgoing.push_back({rank, content, parts});
  }
}

}  // namespace moolink::collective
