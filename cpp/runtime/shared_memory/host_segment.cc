#include "runtime/shared_memory/host_segment.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/barrier.h"
#include "collective/passage.h"
#include "wire/archive.h"

namespace moolink::runtime {
namespace {

constexpr std::uint32_t kMaxRanks = 64;  // their doorbells travel in one message
constexpr Duration kFirstPause = milliseconds(5);
constexpr Duration kLongestPause = milliseconds(500);
constexpr Duration kAnswerWithin = seconds(1);  // doubles
constexpr Duration kLongestAnswer = seconds(8);
constexpr std::uint32_t kWindows = 4;  // of each rank
// Among several hosts, while chunks are on their way to others and back.
constexpr std::uint32_t kWindowsAmongHosts = 8;

}  // namespace

struct HostSegment::Message {
  enum class Kind : std::uint8_t { offer, attached, ready };
  friend constexpr Kind enum_max(Kind) { return Kind::ready; }

  std::string scope;
  Kind kind = Kind::offer;
  std::uint64_t epoch = 0;
  Uid key;  // offer

  auto fields() { return std::tie(scope, kind, epoch, key); }
};

HostSegment::HostSegment(std::shared_ptr<RpcPeer> rpc, std::string group, std::string scope,
                         Use use)
    : rpc_(std::move(rpc)),
      group_name_(std::move(group)),
      scope_(std::move(scope)),
      use_(std::move(use)),
      forks_(rpc_->context()->add(*this)),
      routed_(rpc_->router().route(use_.service, scope_, group_name_,
                                   [this](const Uid& from, const wire::Payload& payload)
                                       MOOLINK_LOCKED { received(from, payload); })) {}

HostSegment::~HostSegment() {
  if (!rpc_->context()->abandoned()) close();
}

void HostSegment::close() {
  if (!std::exchange(routed_, nullptr)) return;
  leave();
  forks_.reset();
}

// The segment stays mapped in the child, which never reads it; its descriptor is closed.
void HostSegment::abandon() noexcept {
  bells_.clear();
  watched_.clear();
  if (segment_ != nullptr) segment_->close_descriptor();
}

std::optional<std::uint32_t> HostSegment::rank_of(const Uid& instance) const {
  for (std::uint32_t rank = 0; rank < here_.size(); ++rank) {
    if (this->instance(rank) == instance) return rank;
  }
  return std::nullopt;
}

collective::PipelineLayout HostSegment::layout() const {
  return {epoch(), static_cast<std::uint32_t>(here_.size()),
          group_->one_host ? kWindows : kWindowsAmongHosts, collective::kWindowBytes};
}

void HostSegment::warn(const Error& error) {
  rpc_->context()->log(LogLevel::warning, use_.what + " go over messages: " + error.message);
}

void HostSegment::enter(Time now, const collective::SharedMembers& group) {
  leave();
  const auto self = group->rank_of(rpc_->instance());
  if (!self) return;
  const collective::Hosts& hosts = group->hosts;
  const auto too_many = [](const auto& ranks) { return ranks.size() > kMaxRanks; };
  const bool shares = group->one_host ? group->size() > 1 : hosts.share_memory();
  if (!shares || hosts.is_guest(*self)) return;
  if (std::ranges::any_of(hosts.ranks, too_many)) {
    return warn(make_error(ErrorCode::error,
                           "a host has more than " + std::to_string(kMaxRanks) + " members"));
  }
  group_ = group;
  here_ = hosts.ranks[hosts.of[*self]];
  rank_ = hosts.place(*self);
  if (leads_group()) {
    for (const auto& ranks : hosts.ranks) hosts_waiting_.insert(ranks[0]);
  }
  if (rank_ == 0) {
    make(now);
  } else if (early_ && early_->epoch == epoch()) {
    take_offer(*std::exchange(early_, std::nullopt));
  }
}

void HostSegment::leave() {
  if (key_) rpc_->descriptors().forget(*key_);
  bell_watch_.reset();
  key_.reset();
  segment_.reset();
  bells_.clear();
  watched_.clear();
  untold_.clear();
  waiting_.clear();
  hosts_waiting_.clear();
  warned_ = false;
  share_at_ = kNever;
  here_.clear();
}

void HostSegment::make(Time now) {
  try {
    segment_ =
        memory::Segment::create(collective::PipelineSegment::bytes_of(layout()), "moolink-group");
    collective::PipelineSegment::initialise(segment_->bytes(), layout());
    for (std::size_t i = 0; i < here_.size(); ++i) {
      io::Doorbell bell = io::make_doorbell();
      bells_.push_back(std::move(bell.rung));
      watched_.push_back(std::move(bell.watched));
    }
  } catch (...) {
    return warn(current_error());
  }
  key_ = Uid::from_entropy();
  for (std::uint32_t rank = 1; rank < here_.size(); ++rank) {
    untold_.insert(rank);
    waiting_.insert(rank);
  }
  share_pause_ = kFirstPause;
  if (!waiting_.empty()) return share_with_all(now);
  guard([&]() MOOLINK_LOCKED { begin(); },
        [this](const Error& error) MOOLINK_LOCKED { warn(error); });
  if (bell_watch_) tell_group(now);
}

void HostSegment::tick(Time now) {
  if (now < share_at_) return;
  if (waiting_.empty()) {
    tell_group(now);
  } else {
    share_with_all(now);
  }
}

// Until READY comes: rank 0 of the group may not have entered the epoch yet.
void HostSegment::tell_group(Time now) {
  if (leads_group()) return host_attached(0);
  send(0, {scope_, Message::Kind::attached, epoch(), {}});
  if (share_pause_ == kLongestAnswer && !std::exchange(warned_, true)) {
    warn(make_error(ErrorCode::error, "the members of other hosts do not all share memory yet"));
  }
  share_at_ = now + share_pause_;
  share_pause_ = std::min(2 * share_pause_, kLongestAnswer);
  rpc_->context()->engine().rearm(share_at_);
}

// A member without a connection through shared memory is asked again later; OFFER makes the peers
// connect.
void HostSegment::share_with_all(Time now) {
  // A descriptor is lost when its connection ends before the peer has read it: a member that does
  // not answer gets it again, a few times.
  if (untold_.empty()) untold_ = waiting_;
  std::vector<int> descriptors{segment_->descriptor(), -1};
  for (const Descriptor& bell : bells_) descriptors.push_back(bell.get());
  std::erase_if(untold_, [&](std::uint32_t rank) MOOLINK_LOCKED {
    descriptors[1] = watched_[rank].get();
    return rpc_->share(instance(rank), *key_, descriptors);
  });
  for (const std::uint32_t rank : waiting_) {
    send(here_[rank], {scope_, Message::Kind::offer, epoch(), *key_});
  }
  const bool last = untold_.empty() && share_pause_ >= kLongestAnswer;
  share_pause_ = untold_.empty() ? std::clamp(2 * share_pause_, kAnswerWithin, kLongestAnswer)
                                 : std::min(2 * share_pause_, kLongestPause);
  share_at_ = last ? kNever : now + share_pause_;
}

void HostSegment::send(std::uint32_t to, const Message& message) {
  rpc_->send_service_to((*group_)[to].instance, (*group_)[to].name, use_.service,
                        {wire::encode(message), {}}, group_name_);
}

void HostSegment::received(const Uid& from, const wire::Payload& payload) {
  const auto message = wire::decode<Message>(payload.body);
  if (message.kind == Message::Kind::offer) {
    const Offer offer{from, message.epoch, message.key};
    if (message.epoch == epoch()) return take_offer(offer);
    // Keeps the last one, whatever epoch it names: a false offer does not stop a member that
    // repeats its own.
    if (message.epoch > epoch()) early_ = offer;
    return;
  }
  const auto sender = here_.empty() ? std::nullopt : group_->rank_of(from);
  if (!sender || message.epoch != epoch()) return;
  if (message.kind == Message::Kind::attached && rank_ == 0) {
    const auto rank = rank_of(from);
    return rank ? attached(*rank) : host_attached(*sender);
  }
  if (message.kind == Message::Kind::ready && sender == 0 && bell_watch_) {
    share_at_ = kNever;
    use_.ready();
  }
}

void HostSegment::take_offer(const Offer& offer) {
  if (rank_of(offer.from) != 0 || rank_ == 0 || key_) return;
  key_ = offer.key;
  // Until leave() forgets the key.
  rpc_->descriptors().expect(*key_, [this](std::vector<Descriptor> descriptors)
                                        MOOLINK_LOCKED { attach(std::move(descriptors)); });
}

void HostSegment::attach(std::vector<Descriptor> descriptors) {
  try {
    if (descriptors.size() != 2 + here_.size()) {
      throw Exception(ErrorCode::wire, "the first rank shared " +
                                           std::to_string(descriptors.size()) + " descriptors");
    }
    const std::uint64_t bytes = collective::PipelineSegment::bytes_of(layout());
    segment_ = memory::Segment::map(descriptors[0], memory::round_to_pages(bytes));
    for (std::size_t i = 1; i < descriptors.size(); ++i) {
      io::check_doorbell(descriptors[i]);
      (i == 1 ? watched_ : bells_).push_back(std::move(descriptors[i]));
    }
    begin();
  } catch (...) {
    return warn(current_error());
  }
  send(here_[0], {scope_, Message::Kind::attached, epoch(), {}});
}

void HostSegment::attached(std::uint32_t rank) {
  if (waiting_.erase(rank) == 0 || !waiting_.empty()) return;
  share_at_ = kNever;
  share_pause_ = kFirstPause;
  begin();
  tell_group(io::now());
}

void HostSegment::host_attached(std::uint32_t first) {
  if (hosts_waiting_.erase(first) == 0 || !hosts_waiting_.empty()) return;
  for (std::uint32_t rank = 1; rank < group_->size(); ++rank) {
    send(rank, {scope_, Message::Kind::ready, epoch(), {}});
  }
  use_.ready();
}

void HostSegment::begin() {
  use_.attached();
  segment_->close_descriptor();
  if (rank_ == 0) watched_.resize(1);  // all have theirs
  // The callback does nothing: the loop polls after each wait.
  bell_watch_ = rpc_->context()->engine().loop().watch(watched_[0].get(), EPOLLIN | EPOLLET,
                                                       [](std::uint32_t) {});
}

}  // namespace moolink::runtime
