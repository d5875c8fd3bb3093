#include "collective/operation.h"

#include <algorithm>
#include <numeric>

namespace moolink::collective {
namespace {

std::vector<std::uint32_t> or_everyone(const std::vector<std::uint32_t>& ranks, std::size_t all) {
  if (!ranks.empty()) return ranks;
  std::vector<std::uint32_t> everyone(all);
  std::iota(everyone.begin(), everyone.end(), 0u);
  return everyone;
}

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
  passage_ = spec()->passage(place_.names.size());
  contributors_ = or_everyone(spec()->contributors, place_.names.size());
  reducers_ = or_everyone(spec()->reducers, place_.names.size());
  mirrored_ = must_mirror();
  flat_ = must_exchange();
  // A retry gives the same memory to the next run, while a task of this run may still write.
  in_place_ = mirrored_ && !request_.options.retry;
  if (is_sliced()) slices_ = slices(spec()->count(), item_size_, reducers_.size());
  asks_ = request_.options.shared == 0 && must_ask();
}

// The same at all members: it depends on the members and the spec, which they compare.
bool Operation::must_ask() const {
  if (spec()->kind != Kind::all_reduce) return true;
  const bool everyone = spec()->contributors.empty() && spec()->reducers.empty();
  const bool on_one_host = place_.one_host && place_.names.size() > 1 && has_output();
  return everyone && (on_one_host || shares_hosts()) && spec()->byte_size() >= kSharedBytes;
}

// Likewise.
bool Operation::must_mirror() const {
  const bool everyone = spec()->contributors.empty() && spec()->reducers.empty();
  return spec()->kind == Kind::all_reduce && place_.one_host &&
         place_.names.size() == kMirroredMembers && everyone && has_output() &&
         spec()->byte_size() <= kSmallBytes;
}

// Likewise.
bool Operation::must_exchange() const {
  return spec()->kind == Kind::all_reduce && place_.hosts != nullptr && place_.hosts->count() > 1 &&
         spec()->contributors.empty() && spec()->reducers.empty();
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
  if (!went_ && started_.size() == place_.names.size()) effects_.ready_to_go = true;
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
  if (is_guest()) return await_results();
  effects_.pass = number;
  if (shares_hosts()) exchange_among_hosts();
}

void Operation::use_messages() {
  uses_messages_ = true;
  if (is_sliced()) {
    have_.assign(slices_.size(), 0);
  } else if (flat_) {
    have_.clear();  // of each chain, when there are some
  } else if (reduces(passage_.kind)) {
    have_.assign(1, 0);
  } else {
    for (std::uint32_t from = 0; from < passage_.ranks; ++from) {
      have_.push_back(passes(passage_, from, place_.rank) ? 0 : 2);
    }
  }
  const std::vector<Buffer>& inputs = request_.inputs;
  const tensor::DType partial = partial_dtype(spec()->dtype);
  // In a ring no member's input is needed any more when the result has arrived.
  const bool in_ring = flat_ && !is_small(spec()->count(), tensor::item_size(partial));
  const bool copies_input = request_.options.lent && !inputs.empty() && !in_ring;
  const bool converts = flat_ && partial != spec()->dtype;
  // A mirrored result is not sent on, and is reduced at once.
  result_ =
      in_place_ ? *request_.options.output : memory_.allocate(output_bytes(passage_, place_.rank));
  if (inputs.size() > 1 || copies_input || converts) {
    SumTask task{spec()->dtype, ReduceOp::sum, 1, inputs, {}};
    task.partial_output = converts;
    const std::size_t item_size = converts ? tensor::item_size(partial) : item_size_;
    task.output = sum_of_inputs_ = memory_.allocate(inputs.front().size() / item_size_ * item_size);
    effects_.tasks.push_back({kOwnInputs, std::move(task)});
    return;
  }
  if (!inputs.empty()) input_ = inputs.front();
  send_pieces();
}

void Operation::send_pieces() {
  if (flat_) return exchange_among_members();
  if (is_sliced()) return send_all_reduce_pieces();
  for (std::uint32_t to = 0; to < passage_.ranks; ++to) {
    if (!passes(passage_, place_.rank, to)) continue;
    const Range range = sent_bytes(passage_, place_.rank, to);
    const Buffer bytes = mirrored_ ? input_ : input_.slice(range.begin, range.count());
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
    if (reducing_ || pieces_.size() != passage_.ranks) return;
    reducing_ = true;
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

void Operation::send_all_reduce_pieces() {
  const bool contributes =
      std::find(contributors_.begin(), contributors_.end(), place_.rank) != contributors_.end();
  for (std::size_t j = 0; j < reducers_.size(); ++j) {
    if (!takes_part(j)) {
      have_[j] = 2;
    } else if (contributes && reducers_[j] == place_.rank) {
      pieces_[place_.rank] = bytes_of(input_, slices_[j]);
    } else if (contributes) {
      effects_.outgoing.push_back({reducers_[j], Piece{*spec()}, {bytes_of(input_, slices_[j])}});
    }
  }
  reduce_when_complete();
  finish_when_complete();
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
  const bool slices =
      std::holds_alternative<Piece>(content) || std::holds_alternative<Reduced>(content);
  if (slices && flat_) {
    return refuse(from, name_of(from) + " sent a slice and not a portion of what hosts exchange");
  }
  if (const auto* theirs = std::get_if<Piece>(&content)) {
    piece(from, theirs->spec, parts);
  } else if (const auto* start = std::get_if<Started>(&content)) {
    started(from, start->spec);
  } else if (const auto* word = std::get_if<Go>(&content)) {
    if (from == 0) go(word->shared);
  } else if (const auto* elements = std::get_if<Portion>(&content)) {
    portion(from, *elements, parts);
  } else if (std::holds_alternative<Reduced>(content)) {
    reduced(from, parts);
  } else if (std::holds_alternative<Value>(content)) {
    value_arrived(from, parts);
  } else if (from == 0) {
    value_ = from_parts(parts);
    effects_.finished = true;
  }
}

std::size_t Operation::owner_index(std::uint32_t rank) const {
  return static_cast<std::size_t>(std::find(reducers_.begin(), reducers_.end(), rank) -
                                  reducers_.begin());
}

void Operation::piece(std::uint32_t from, const OpSpec& theirs, const std::vector<Buffer>& parts) {
  if (theirs != *spec()) return refuse(from, difference(from, theirs));
  if (!is_sliced()) {
    if (!passes(passage_, from, place_.rank) || parts.size() != 1 ||
        parts[0].size() !=
            (mirrored_ ? spec()->byte_size() : placed_bytes(passage_, from, place_.rank).count())) {
      return refuse(from, name_of(from) + " sent elements that have no place here");
    }
    pieces_.emplace(from, parts[0]);
    if (sent_) place_piece(from);
    return;
  }
  const std::size_t mine = owner_index(place_.rank);
  const bool expected = std::binary_search(contributors_.begin(), contributors_.end(), from);
  if (mine == reducers_.size() || !expected || parts.size() != 1 ||
      parts[0].size() != slices_[mine].count() * item_size_) {
    return refuse(
        from, name_of(from) + " sent elements that " + name_of(place_.rank) + " does not reduce");
  }
  pieces_.emplace(from, parts[0]);
  reduce_when_complete();
}

void Operation::reduce_when_complete() {
  const std::size_t mine = owner_index(place_.rank);
  if (!uses_messages_ || reducing_ || mine == reducers_.size() || !takes_part(mine)) return;
  // The last piece of the others may arrive before one's own inputs are summed.
  if (pieces_.size() != contributors_.size()) return;
  reducing_ = true;
  have_[mine] = 1;
  SumTask task{spec()->dtype, spec()->op, spec()->divisor, {}, bytes_of(result_, slices_[mine])};
  for (auto& [rank, bytes] : pieces_) task.inputs.push_back(bytes);
  effects_.tasks.push_back({static_cast<std::uint32_t>(mine), std::move(task)});
}

void Operation::reduced(std::uint32_t from, const std::vector<Buffer>& parts) {
  const std::size_t theirs = owner_index(from);
  if (!is_sliced() || theirs == reducers_.size() || parts.size() != 1 ||
      parts[0].size() != slices_[theirs].count() * item_size_) {
    return refuse(from, name_of(from) + " sent a result that has no place here");
  }
  if (!uses_messages_) return refuse(from, name_of(from) + " sent a result before it could");
  if (have_[theirs] != 0) return;
  have_[theirs] = 1;
  put(static_cast<std::uint32_t>(theirs), parts[0], bytes_of(result_, slices_[theirs]));
}

void Operation::summed(std::uint32_t slice) {
  if (effects_.finished || error_) return;
  if (slice == kResult) {
    effects_.finished = true;
    return;
  }
  if (slice == kOwnInputs) {
    input_ = sum_of_inputs_;
    return send_pieces();
  }
  if (exchange_ && is_of_exchange(slice)) {
    exchange_->done(slice / 2);
    return take_exchange_effects();
  }
  if (exchange_) slice /= 2;
  if (slice >= have_.size() || have_[slice] != 1) return;
  have_[slice] = 2;
  if (shared_ == 0 && is_sliced() && reducers_[slice] == place_.rank) {
    pieces_.clear();
    to_others(Reduced{}, {bytes_of(result_, slices_[slice])});
  }
  finish_when_complete();
}

void Operation::finish_when_complete() {
  const bool complete =
      std::all_of(have_.begin(), have_.end(), [](auto have) { return have == 2; });
  // A single member has one slice; without reducers nothing could ever be here.
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
  if (values_.size() != place_.names.size()) return;
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
  for (std::uint32_t rank = 0; rank < place_.names.size(); ++rank) {
    if (rank != place_.rank) effects_.outgoing.push_back({rank, content, parts});
  }
}

}  // namespace moolink::collective
