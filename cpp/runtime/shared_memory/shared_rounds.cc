#include "runtime/shared_memory/shared_rounds.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "base/barrier.h"
#include "base/crash_point.h"
#include "collective/kernels.h"

namespace moolink::runtime {
namespace {

constexpr std::uint32_t kDepth = 2;
constexpr std::uint64_t kPieceBytes = std::uint64_t{512} << 10;

}  // namespace

std::shared_ptr<SharedRounds> SharedRounds::create(std::shared_ptr<RpcPeer> rpc, std::string group,
                                                   std::string scope,
                                                   std::vector<collective::SharedSection> sections,
                                                   std::size_t bucket_bytes, Events events) {
  std::shared_ptr<SharedRounds> made(
      new SharedRounds(std::move(rpc), std::move(sections), bucket_bytes, std::move(events)));
  SharedRounds* self = made.get();  // the segment's owner: it outlives its calls
  HostSegment::Use use;
  use.what = "rounds";
  use.service = rpc::Service::accumulate;
  use.bytes = [self](const Members& members) {
    return collective::SharedReduce::segment_bytes(self->layout(members));
  };
  use.initialise = [self](std::span<std::byte> memory, const Members& members) {
    collective::SharedReduce::initialise(memory, self->layout(members));
  };
  const std::weak_ptr weak(made);
  use.attached = [weak] {
    if (const auto rounds = weak.lock()) rounds->attach();
  };
  use.ready = [weak] {
    if (const auto rounds = weak.lock()) rounds->events_.ready(rounds->segment_->members().epoch);
  };
  made->segment_ =
      HostSegment::create(made->rpc_, std::move(group), std::move(scope), std::move(use));
  try {
    made->rpc_->context()->engine().loop().add(*made);
  } catch (...) {
    made->close();
    throw;
  }
  return made;
}

SharedRounds::SharedRounds(std::shared_ptr<RpcPeer> rpc,
                           std::vector<collective::SharedSection> sections,
                           std::size_t bucket_bytes, Events events)
    : rpc_(std::move(rpc)),
      sections_(std::move(sections)),
      bucket_bytes_(bucket_bytes),
      events_(std::move(events)) {
  for (const collective::SharedSection& section : sections_) {
    const std::uint64_t bytes = section.count * tensor::item_size(section.dtype);
    for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
      pieces_.push_back({section.dtype, section.offset + at, std::min(kPieceBytes, bytes - at)});
    }
  }
}

SharedRounds::~SharedRounds() = default;

void SharedRounds::close() {
  if (std::exchange(closed_, true)) return;
  leave();
  segment_->close();
  rpc_->context()->engine().loop().remove(*this);
}

collective::SharedLayout SharedRounds::layout(const Members& members) const {
  return {members.epoch, static_cast<std::uint32_t>(members.instances.size()), kDepth,
          kDepth + kLentInputs, bucket_bytes_};
}

void SharedRounds::enter(Time now, Members members) {
  if (reduce_) reduce_->give_up();
  leave();
  if (bucket_bytes_ == 0) members.one_host = false;  // there is nothing to share
  segment_->enter(now, std::move(members));
}

void SharedRounds::leave() {
  reduce_.reset();
  lent_.reset();
  used_by_ = {};
  incoming_.clear();
  started_.clear();
  segment_->leave();
}

void SharedRounds::attach() {
  const std::shared_ptr<memory::Segment>& segment = segment_->segment();
  reduce_ = std::make_unique<collective::SharedReduce>(
      segment, segment->bytes(), layout(segment_->members()), segment_->rank());
  lent_ = std::make_shared<Lent>();
  lent_->segment = segment;
}

// --- rounds

void SharedRounds::reduce(Round round) {
  if (!reduce_ || round.epoch != segment_->members().epoch) {
    events_.failed(round.epoch, round.round,
                   {ErrorCode::error,
                    "the leader reduces it in shared memory, which this member does not have",
                    {},
                    {},
                    {},
                    {},
                    Ran::no});
    return;
  }
  Passing passing;
  passing.round = std::move(round);
  for (const Buffer& input : passing.round.inputs) {
    if (!lent_bucket(input)) passing.elsewhere.push_back(input);
  }
  incoming_.push_back(std::move(passing));
  rpc_->context()->engine().loop().wake();
}

MutableBuffer SharedRounds::input() {
  if (!reduce_) return {};
  for (std::uint32_t i = 0; i < kLentInputs; ++i) {
    if (used_by_[i] > reduce_->completed() || lent_->away[i].load()) continue;
    lent_->away[i].store(true);
    const std::span<std::byte> memory = reduce_->input(kDepth + i);
    const auto give_back = [lent = lent_, i](void*) { lent->away[i].store(false); };
    return {std::shared_ptr<void>(memory.data(), give_back), memory.data(), memory.size()};
  }
  return {};
}

std::optional<std::uint32_t> SharedRounds::lent_bucket(const Buffer& input) const {
  for (std::uint32_t bucket = kDepth; bucket < kDepth + kLentInputs; ++bucket) {
    if (reduce_->input(bucket).data() == input.data()) return bucket;
  }
  return std::nullopt;
}

bool SharedRounds::poll() {
  if (!reduce_) return false;
  const auto keep = shared_from_this();
  bool worked = true;
  guard([&] { worked = advance(); }, [this](const Error& error) { fail(error); });
  return worked;
}

// One piece of copying or arithmetic, so that other work is never delayed for long.
bool SharedRounds::advance() {
  if (may_write_input()) {
    write_input();
  } else if (!reduce_->step()) {
    if (!has_result()) return false;
    read_result();
  }
  if (!reduce_) return true;
  for (const std::uint32_t rank : reduce_->take_wakeups()) segment_->ring(rank);
  return true;
}

// A whole result is ready as soon as this rank is done, and needs no copy.
bool SharedRounds::has_result() const {
  if (started_.empty()) return false;
  return started_.front().round.s <= (is_whole() ? reduce_->reduced() : reduce_->completed());
}

// The input's place is free once the operation that used it is complete.
bool SharedRounds::may_write_input() const {
  if (incoming_.empty()) return false;
  const std::uint64_t s = incoming_.front().round.s;
  return incoming_.front().elsewhere.empty() || s <= kDepth || reduce_->completed() >= s - kDepth;
}

// Several contributions of this member outside the segment become one input.
void SharedRounds::write_input() {
  Passing& passing = incoming_.front();
  const std::vector<Buffer>& inputs = passing.elsewhere;
  if (inputs.empty() || passing.next == pieces_.size()) return start();
  const auto bucket = static_cast<std::uint32_t>(passing.round.s % kDepth);
  const Piece& piece = pieces_[passing.next++];
  std::byte* target = reduce_->input(bucket).data() + piece.offset;
  if (inputs.size() == 1) {
    std::memcpy(target, inputs[0].data() + piece.offset, piece.bytes);
    return;
  }
  std::vector<Buffer> parts;
  for (const Buffer& input : inputs) parts.push_back(input.slice(piece.offset, piece.bytes));
  collective::run({piece.dtype, collective::ReduceOp::sum, 1, std::move(parts),
                   MutableBuffer(segment_->segment(), target, piece.bytes)});
}

void SharedRounds::start() {
  Passing passing = std::move(incoming_.front());
  incoming_.pop_front();
  const Round& round = passing.round;
  std::set<std::uint32_t> buckets;
  for (const Buffer& input : round.inputs) {
    const auto bucket = lent_bucket(input);
    buckets.insert(bucket.value_or(static_cast<std::uint32_t>(round.s % kDepth)));
    if (bucket) used_by_[*bucket - kDepth] = round.s;
  }
  const bool whole = is_whole();
  if (whole) passing.own = rpc_->context()->pool().allocate(bucket_bytes_);
  reduce_->start({round.s, collective::ReduceOp::sum, static_cast<double>(round.total), sections_,
                  round.contributors, whole ? std::vector<std::uint32_t>() : round.reducers, whole},
                 {buckets.begin(), buckets.end()}, passing.own);
  crash_point("slice.sent");
  // A lent input is not written before the operation is complete: input() ensures it.
  passing.round.inputs.clear();
  passing.elsewhere.clear();
  passing.next = 0;
  started_.push_back(std::move(passing));
}

void SharedRounds::read_result() {
  Passing& passing = started_.front();
  if (passing.own.empty()) passing.own = rpc_->context()->pool().allocate(bucket_bytes_);
  if (!is_whole() && passing.next < pieces_.size()) {
    const Buffer shared = reduce_->result(passing.round.s);
    const Piece& piece = pieces_[passing.next++];
    std::memcpy(passing.own.data() + piece.offset, shared.data() + piece.offset, piece.bytes);
    return;
  }
  if (reduce_->given_up()) return leave();  // the message about the next epoch is in transit
  reduce_->release(passing.round.s);
  const std::uint64_t round = passing.round.round;
  const MutableBuffer result = std::move(passing.own);
  started_.pop_front();
  events_.done(segment_->members().epoch, round, result);
}

// The members disagree, or this one cannot continue: the rounds of this epoch fail here, and the
// leader starts a change of epoch.
void SharedRounds::fail(const Error& error) {
  std::vector<std::uint64_t> rounds;
  for (const Passing& passing : started_) rounds.push_back(passing.round.round);
  for (const Passing& passing : incoming_) rounds.push_back(passing.round.round);
  const std::uint64_t epoch = segment_->members().epoch;
  leave();
  for (const std::uint64_t round : rounds) events_.failed(epoch, round, error);
}

bool SharedRounds::prepare_sleep() {
  if (!reduce_) return true;
  const bool waits = reduce_->announce_sleep();
  if (!has_result() && !may_write_input() && reduce_->may_sleep()) return true;
  if (waits) reduce_->awake();
  return false;
}

void SharedRounds::awake() {
  if (reduce_) reduce_->awake();
}

}  // namespace moolink::runtime
