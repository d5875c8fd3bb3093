#include "runtime/shared_rounds.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crash_point.h"
#include "collective/kernels.h"
#include "wire/archive.h"

namespace moolink::runtime {
namespace {

constexpr std::uint32_t kDepth = 2;
constexpr std::uint32_t kMaxRanks = 64;  // their doorbells travel in one message
constexpr std::uint64_t kPieceBytes = std::uint64_t{512} << 10;
constexpr Duration kFirstPause = milliseconds(5);
constexpr Duration kLongestPause = milliseconds(500);

}  // namespace

struct SharedRounds::Message {
  enum class Kind : std::uint8_t { offer, attached, ready, kMax = ready };

  std::string scope;
  Kind kind = Kind::offer;
  std::uint64_t epoch = 0;
  Uid key;  // offer

  template <class Fields>
  void fields(Fields& f) {
    f(scope, kind, epoch, key);
  }
};

std::shared_ptr<SharedRounds> SharedRounds::create(std::shared_ptr<RpcPeer> rpc, std::string scope,
                                                   std::vector<collective::SharedSection> sections,
                                                   std::size_t bucket_bytes, Events events) {
  std::shared_ptr<SharedRounds> made(new SharedRounds(
      std::move(rpc), std::move(scope), std::move(sections), bucket_bytes, std::move(events)));
  made->rpc_->router().add(
      rpc::Service::accumulate, made->scope_,
      [weak = std::weak_ptr(made)](const Uid& from, const wire::Payload& payload) {
        if (const auto self = weak.lock()) self->received(from, payload);
      });
  made->rpc_->context()->engine().loop().add(*made);
  made->rpc_->context()->add(static_cast<Forkable&>(*made));
  return made;
}

SharedRounds::SharedRounds(std::shared_ptr<RpcPeer> rpc, std::string scope,
                           std::vector<collective::SharedSection> sections,
                           std::size_t bucket_bytes, Events events)
    : rpc_(std::move(rpc)),
      scope_(std::move(scope)),
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
  rpc_->context()->engine().loop().remove(*this);
  rpc_->context()->remove(static_cast<Forkable&>(*this));
  rpc_->router().remove(rpc::Service::accumulate, scope_);
}

// The segment stays mapped in the child, which never looks at it; its descriptor goes.
void SharedRounds::abandon() noexcept {
  bells_.clear();
  if (segment_ != nullptr) segment_->close_descriptor();
}

collective::SharedLayout SharedRounds::layout() const {
  return {members_.epoch, static_cast<std::uint32_t>(members_.instances.size()), kDepth,
          kDepth + kLentInputs, bucket_bytes_};
}

std::optional<std::uint32_t> SharedRounds::rank_of(const Uid& instance) const {
  const auto found = std::find(members_.instances.begin(), members_.instances.end(), instance);
  if (found == members_.instances.end()) return std::nullopt;
  return static_cast<std::uint32_t>(found - members_.instances.begin());
}

// --- from an epoch to a segment that all have

void SharedRounds::enter(Time now, Members members) {
  if (reduce_) reduce_->give_up();
  leave();
  members_ = std::move(members);
  const auto self = rank_of(rpc_->instance());
  const std::size_t ranks = members_.instances.size();
  if (!members_.one_host || !self || ranks < 2 || ranks > kMaxRanks || bucket_bytes_ == 0) return;
  rank_ = *self;
  if (rank_ == 0) {
    make_segment(now);
  } else if (early_ && early_->epoch == members_.epoch) {
    take_offer(*std::exchange(early_, std::nullopt));
  }
}

void SharedRounds::leave() {
  if (key_) rpc_->descriptors().forget(key_);
  if (bell_watch_ != 0) rpc_->context()->engine().loop().unwatch(std::exchange(bell_watch_, 0));
  key_ = {};
  reduce_.reset();
  lent_.reset();
  used_by_ = {};
  segment_.reset();
  bells_.clear();
  incoming_.clear();
  started_.clear();
  untold_.clear();
  waiting_.clear();
  share_at_ = kNever;
  members_ = {};
}

void SharedRounds::make_segment(Time now) {
  try {
    segment_ = memory::Segment::create(collective::SharedReduce::segment_bytes(layout()),
                                       "moolink-rounds");
    collective::SharedReduce::initialise(segment_->bytes(), layout());
    for (std::size_t i = 0; i < members_.instances.size(); ++i) {
      bells_.push_back(io::Doorbell::create());
    }
  } catch (const Exception& e) {
    rpc_->context()->log(LogLevel::warning, "rounds go over messages: " + e.error().message);
    return;
  }
  key_ = Uid::from_entropy();
  for (std::uint32_t rank = 1; rank < members_.instances.size(); ++rank) {
    untold_.insert(rank);
    waiting_.insert(rank);
  }
  share_pause_ = kFirstPause;
  share_with_all(now);
}

void SharedRounds::tick(Time now) {
  if (now >= share_at_) share_with_all(now);
}

// A member with which there is no connection through shared memory is asked again later; OFFER
// makes the peers connect.
void SharedRounds::share_with_all(Time now) {
  std::vector<int> descriptors{segment_->descriptor()};
  for (const io::Doorbell& bell : bells_) descriptors.push_back(bell.descriptor());
  std::erase_if(untold_, [&](std::uint32_t rank) {
    return rpc_->share(members_.instances[rank], key_, descriptors);
  });
  for (const std::uint32_t rank : waiting_) {
    send(rank, {scope_, Message::Kind::offer, members_.epoch, key_});
  }
  share_at_ = untold_.empty() ? kNever : now + share_pause_;
  share_pause_ = std::min(2 * share_pause_, kLongestPause);
}

void SharedRounds::send(std::uint32_t rank, const Message& message) {
  rpc_->router().send(members_.instances[rank], members_.names[rank], rpc::Service::accumulate,
                      {wire::encode(message), {}});
}

void SharedRounds::received(const Uid& from, const wire::Payload& payload) {
  const auto message = wire::decode<Message>(payload.body);
  if (message.kind == Message::Kind::offer) {
    const Offer offer{from, message.epoch, message.key};
    if (message.epoch == members_.epoch) return take_offer(offer);
    const std::uint64_t newest = early_ ? early_->epoch : members_.epoch;
    if (message.epoch > newest) early_ = offer;
    return;
  }
  const auto rank = rank_of(from);
  if (message.epoch != members_.epoch || !rank) return;
  if (message.kind == Message::Kind::attached && rank_ == 0) attached(*rank);
  if (message.kind == Message::Kind::ready && *rank == 0 && reduce_) {
    events_.ready(members_.epoch);
  }
}

void SharedRounds::take_offer(const Offer& offer) {
  if (rank_of(offer.from) != 0 || rank_ == 0 || key_) return;
  key_ = offer.key;
  rpc_->descriptors().expect(
      key_, [weak = weak_from_this(), key = key_](std::vector<Descriptor> descriptors) {
        const auto self = weak.lock();
        if (self && self->key_ == key) self->attach(std::move(descriptors));
      });
}

void SharedRounds::attach(std::vector<Descriptor> descriptors) {
  try {
    if (descriptors.size() != 1 + members_.instances.size()) {
      throw Exception(ErrorCode::wire, "the first rank shared " +
                                           std::to_string(descriptors.size()) + " descriptors");
    }
    const std::uint64_t bytes = collective::SharedReduce::segment_bytes(layout());
    segment_ = memory::Segment::map(std::move(descriptors[0]), memory::round_to_pages(bytes));
    for (std::size_t i = 1; i < descriptors.size(); ++i) {
      bells_.push_back(io::Doorbell::adopt(std::move(descriptors[i])));
    }
    begin();
  } catch (const Exception& e) {
    rpc_->context()->log(LogLevel::warning, "rounds go over messages: " + e.error().message);
    return;
  }
  send(0, {scope_, Message::Kind::attached, members_.epoch, {}});
}

void SharedRounds::attached(std::uint32_t rank) {
  if (waiting_.erase(rank) == 0 || !waiting_.empty()) return;
  begin();
  for (std::uint32_t other = 1; other < members_.instances.size(); ++other) {
    send(other, {scope_, Message::Kind::ready, members_.epoch, {}});
  }
  events_.ready(members_.epoch);
}

void SharedRounds::begin() {
  reduce_ =
      std::make_unique<collective::SharedReduce>(segment_, segment_->bytes(), layout(), rank_);
  lent_ = std::make_shared<Lent>();
  lent_->segment = segment_;
  segment_->close_descriptor();
  // Nothing to do in the callback: the loop polls after each wait.
  bell_watch_ = rpc_->context()->engine().loop().watch(bells_[rank_].descriptor(),
                                                       EPOLLIN | EPOLLET, [](std::uint32_t) {});
}

// --- rounds

void SharedRounds::reduce(Round round) {
  if (!reduce_ || round.epoch != members_.epoch) {
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
  try {
    return advance();
  } catch (const Exception& e) {
    fail(e.error());
  } catch (const std::bad_alloc&) {
    fail({ErrorCode::error, "out of memory", {}, {}, {}, {}, Ran::no});
  }
  return true;
}

// One piece of copying or arithmetic, so that other work is never far behind.
bool SharedRounds::advance() {
  if (may_write_input()) {
    write_input();
  } else if (!reduce_->step()) {
    if (!has_result()) return false;
    read_result();
  }
  if (reduce_) ring();
  return true;
}

// A whole result is there as soon as this rank is done, and nobody need copy it.
bool SharedRounds::has_result() const {
  if (started_.empty()) return false;
  return started_.front().round.s <= (is_whole() ? reduce_->reduced() : reduce_->completed());
}

// The input's place is free once the operation that had it is complete.
bool SharedRounds::may_write_input() const {
  if (incoming_.empty()) return false;
  const std::uint64_t s = incoming_.front().round.s;
  return incoming_.front().elsewhere.empty() || s <= kDepth || reduce_->completed() >= s - kDepth;
}

// Several contributions of this member that are not in the segment become one input.
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
                   MutableBuffer(segment_, target, piece.bytes)});
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
  // An input that was lent is not written before the operation is complete: input() sees to it.
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
  if (reduce_->given_up()) return leave();  // the news of the next epoch is on its way
  reduce_->release(passing.round.s);
  const std::uint64_t round = passing.round.round;
  MutableBuffer result = std::move(passing.own);
  started_.pop_front();
  events_.done(members_.epoch, round, std::move(result));
}

void SharedRounds::ring() {
  for (const std::uint32_t rank : reduce_->take_wakeups()) bells_[rank].ring();
}

// The members disagree, or this one cannot go on: the rounds of this epoch fail here, and the
// leader has the epoch changed.
void SharedRounds::fail(const Error& error) {
  std::vector<std::uint64_t> rounds;
  for (const Passing& passing : started_) rounds.push_back(passing.round.round);
  for (const Passing& passing : incoming_) rounds.push_back(passing.round.round);
  const std::uint64_t epoch = members_.epoch;
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
