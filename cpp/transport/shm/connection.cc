#include "transport/shm/connection.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "io/descriptor_passing.h"

namespace moolink::transport::shm {
namespace {

constexpr std::size_t kLowWater = std::size_t{1} << 20;
constexpr std::size_t kHighWater = std::size_t{4} << 20;
constexpr int kPreference = 20;  // above tcp: one copy less and no system call
// A grant costs a round trip and saves one copy and all waits for a full ring.
constexpr std::size_t kGrantBytes = std::size_t{256} << 10;
// Bytes taken in one poll, so that the lock is not held for long while the peer keeps writing.
constexpr std::size_t kPollBudget = std::size_t{1} << 20;
constexpr int kNoticesAtOnce = 1024;  // more than the socket of an honest peer holds
constexpr std::size_t kMaxEarlyNotices = 4;
constexpr std::size_t kMaxEarlyLoans = 2;  // segments lent to a peer that may not be ready for more
// A dying process closes its sockets before its pidfd reports; an unexplained end of file waits
// this long for the proof.
constexpr Duration kProofOfDeath = milliseconds(250);

}  // namespace

ShmConnection::ShmConnection(Environment& environment, ConnectionOwner& owner, std::string dialled)
    : ConnectionBase(environment, owner, std::move(dialled), kLowWater, kHighWater),
      grants_(std::make_shared<GrantPool>()),
      passed_(grants_, environment.lending) {
  peer_address_ = this->dialled();
  traits_.preference = kPreference;
  traits_.grants = true;
  traits_.standing_grants = true;
  traits_.grant_bytes = kGrantBytes;
  traits_.loans = true;
}

ShmConnection::~ShmConnection() = default;

void ShmConnection::watch_peer() {
  polled_ = environment_.loop.add(*this);
  const auto self = shared_from_this();
  // The callback does nothing: the loop polls every ring after each wait.
  bell_watch_ = environment_.loop.watch(bell_.get(), EPOLLIN | EPOLLET, [self](std::uint32_t) {});
  if (!pidfd_) return;
  pidfd_watch_ = environment_.loop.watch(
      pidfd_.get(), EPOLLIN, [this, self](std::uint32_t) MOOLINK_LOCKED { peer_exited(); });
}

void ShmConnection::authenticated() {
  owner_.established(id());
  for (io::DescriptorMessage& message : std::exchange(early_notices_, {})) {
    take_notice(std::move(message));
  }
}

// --- sending

void ShmConnection::send_queued() {
  queue_.write_to(*writer_);
  // Room that appeared meanwhile is left to the loop, so that no caller stays here for long;
  // otherwise the reader rings when there is room.
  if (!queue_.empty() && !writer_->await_room()) environment_.loop.wake();
  tell_writable(*this);
  if (queue_.empty() && state_ == State::closing) finish_close();
}

// --- receiving

bool ShmConnection::poll() {
  if (state_ == State::closed || failed_) return false;
  const auto keep = shared_from_this();
  bool something = false;
  if (!queue_.empty()) {
    guarded([&]() MOOLINK_LOCKED { something = send_some(); });
  }
  if (!usable()) return something;
  guarded([&]() MOOLINK_LOCKED {
    something |= fill();
    something |= receive();
    if (passed_.changed()) passed_.tell_retired(socket_.get());
    theirs_.tell_mapped(socket_.get());
    if (heard_) theirs_.tell_devices(socket_.get());
  });
  return something;
}

bool ShmConnection::receive() {
  if (state_ != State::open) return false;
  const bool established = established_;
  const bool something = receiver_.receive(*reader_, kPollBudget);
  heard_ |= established && something;
  return something;
}

// --- segments

std::optional<Grant> ShmConnection::allocate_grant(std::size_t bytes) {
  if (!usable()) return std::nullopt;
  std::optional<Grant> grant = grants_->allocate(bytes);
  // The peer must know the segment before it gets a grant in it.
  if (!grant || !passed_.pass(socket_.get(), {Access::fill, grant->place.segment})) {
    return std::nullopt;
  }
  watch_idle_grants();
  return grant;
}

void ShmConnection::fill_grant(const wire::GrantPlace& place, Buffer bytes) {
  if (!usable()) return;
  learn({Access::fill, place.segment});
  filler_.begin(place, theirs_.at(place), std::move(bytes));
  environment_.loop.wake();
}

MutableBuffer ShmConnection::grant_memory(const wire::GrantPlace& place) {
  if (!usable()) return {};
  learn({Access::fill, place.segment});
  return theirs_.at(place);
}

// The peer passes a segment through the socket before it writes a place in it into the ring.
void ShmConnection::learn(SegmentId segment) {
  if (!theirs_.knows(segment) && usable()) take_notices();
}

bool ShmConnection::pass_segment(std::uint64_t segment) {
  if (!usable()) return false;
  return passed_.pass(socket_.get(), to_read(segment), heard_ ? kMaxSegments : kMaxEarlyLoans);
}

Buffer ShmConnection::map_loan(const wire::LoanPlace& place) {
  learn(to_read(place.segment));
  return theirs_.at(place, socket_.get());
}

bool ShmConnection::share(const Uid& key, std::span<const int> descriptors) {
  if (!usable()) return false;
  try {
    return send_notice(socket_.get(), {.kind = NoticeKind::share, .key = key}, descriptors);
  } catch (const Exception& e) {
    if (e.error().code != ErrorCode::peer_lost) throw;
    return false;  // the end of file gives the reason
  }
}

// Posted: notices are also taken inside fill_grant(), which must not call the handler.
void ShmConnection::tell_shared(const Uid& key, std::vector<Descriptor> descriptors) {
  auto passed = std::make_shared<std::vector<Descriptor>>(std::move(descriptors));
  environment_.loop.post([this, self = shared_from_this(), key, passed]() MOOLINK_LOCKED {
    if (state_ == State::open) environment_.handler.shared(*this, key, std::move(*passed));
  });
}

// Copies one slice; true if there was something to copy.
bool ShmConnection::fill() {
  if (filler_.idle()) return false;
  if (const auto full = filler_.step()) environment_.handler.grant_filled(*this, *full);
  return true;
}

bool ShmConnection::prepare_sleep() {
  if (state_ == State::closed || failed_) return true;
  if (!queue_.empty() && !writer_->await_room()) return false;
  if (!filler_.idle()) return false;
  return state_ != State::open || reader_->prepare_sleep();
}

void ShmConnection::awake() {
  if (state_ == State::open) reader_->wake();
}

void ShmConnection::read_to_the_end() {
  // The peer writes no more, so this ends; a peer that still writes is cut off after two rings.
  for (std::size_t left = 2 * kDefaultRingBytes; left > 0 && poll(); left -= kPollBudget) {
  }
}

// --- the end

// False at the end of file.
bool ShmConnection::take_notices() {
  io::DescriptorMessage message;
  for (int taken = 0; taken < kNoticesAtOnce; ++taken) {
    switch (io::receive_message(socket_.get(), message)) {
      case io::Received::nothing:
        return true;
      case io::Received::end:
        return false;
      case io::Received::message:
        take_notice(std::move(message));
    }
  }
  return true;
}

void ShmConnection::take_notice(io::DescriptorMessage message) {
  const Notice notice = decode_notice(message);
  if (!established_ && notice.kind != NoticeKind::bye) {
    // The peer may have greeted through the ring already, but segments of an unauthenticated peer
    // are not mapped here.
    if (early_notices_.size() == kMaxEarlyNotices) {
      throw Exception(ErrorCode::wire, "descriptors were passed before the greeting");
    }
    early_notices_.push_back(std::move(message));
    return;
  }
  switch (notice.kind) {
    case NoticeKind::bye:
      peer_said_bye_ = true;
      return;
    case NoticeKind::pass:
      return theirs_.add(notice, std::move(message.descriptors[0]));
    case NoticeKind::retire:
      return theirs_.remove({notice.access, notice.segment});
    case NoticeKind::mapped:
      return passed_.mapped(notice.segment);
    case NoticeKind::receives:
      return passed_.peer_receives(notice.key);
    case NoticeKind::refuses:
      return passed_.peer_refuses(notice.key);
    case NoticeKind::share:
      return tell_shared(notice.key, std::move(message.descriptors));
    case NoticeKind::greeting:
      break;
  }
  throw Exception(ErrorCode::wire, "a notice that is not expected here");
}

void ShmConnection::socket_ready() {
  if (failed_) return;
  const auto keep = shared_from_this();
  guarded([this]() MOOLINK_LOCKED {
    if (!reader_) return take_greeting();
    if (!take_notices()) socket_ended();
  });
}

void ShmConnection::socket_ended() {
  if (state_ == State::closed) return;
  if (state_ == State::closing) return finish_close();
  socket_watch_.reset();
  read_to_the_end();
  if (!usable()) return;
  const auto closed_by_peer = [this, self = shared_from_this()]() MOOLINK_LOCKED {
    fail(make_error(ErrorCode::peer_lost,
                    "connection with " + peer_address_ + ": closed by the peer"));
  };
  if (peer_said_bye_ || !pidfd_) return closed_by_peer();
  timer_ = environment_.loop.timer(io::now() + kProofOfDeath, closed_by_peer);
}

void ShmConnection::peer_exited() {
  const auto keep = shared_from_this();
  pidfd_watch_.reset();
  if (state_ == State::closing) return finish_close();
  read_to_the_end();
  fail(make_error(ErrorCode::peer_lost,
                  "connection with " + peer_address_ + ": its process has ended"),
       true);
}

void ShmConnection::release() {
  if (reader_) try_send_notice(socket_.get(), Notice{}, {});  // may fail: the peer closed first
  polled_.reset();
  socket_watch_.reset();
  pidfd_watch_.reset();
  bell_watch_.reset();
  close_descriptors();
  early_notices_.clear();
  filler_.clear();
  grants_->close();
}

void ShmConnection::close_descriptors() noexcept {
  socket_.reset();
  pidfd_.reset();
  bell_.reset();
  peer_bell_.reset();
}

void ShmConnection::abandon() noexcept {
  close_descriptors();
  theirs_.abandon();
}

}  // namespace moolink::transport::shm
