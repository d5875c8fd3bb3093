#include "transport/shm/connection.h"

#include <algorithm>
#include <utility>

#include "base/barrier.h"
#include "io/descriptor_passing.h"

namespace moolink::transport::shm {
namespace {

constexpr int kPreference = 20;  // above tcp: one copy less and no system call
// A grant costs a round trip and saves one copy and all waits for a full ring.
constexpr std::size_t kGrantBytes = std::size_t{256} << 10;
constexpr std::size_t kStrangerFrame = std::size_t{16} << 10;  // many times a greeting
// Bytes taken in one poll, so that the lock is not held for long while the peer keeps writing.
constexpr std::size_t kPollBudget = std::size_t{1} << 20;
constexpr int kNoticesAtOnce = 1024;  // more than the socket of an honest peer holds
constexpr std::size_t kMaxEarlyNotices = 4;
constexpr std::size_t kMaxEarlyLoans = 2;  // segments lent to a peer that may not be ready for more
constexpr Duration kLinger = seconds(1);
constexpr Duration kIdle = seconds(5);  // unused for this long, or twice, memory is returned
// A dying process closes its sockets before its pidfd reports; an unexplained end of file waits
// this long for the proof.
constexpr Duration kProofOfDeath = milliseconds(250);

}  // namespace

ShmConnection::ShmConnection(Environment& environment, Owner& owner, Link link)
    : environment_(environment),
      owner_(owner),
      id_(environment.next_connection_id()),
      peer_address_(std::move(link.peer_address)),
      socket_(std::move(link.socket)),
      pidfd_(std::move(link.pidfd)),
      bell_(std::move(link.bell)),
      peer_bell_(std::move(link.peer_bell)),
      writer_(std::move(link.outgoing), peer_bell_),
      reader_(std::move(link.incoming), peer_bell_),
      receiver_(environment, *this),
      grants_(std::make_shared<GrantPool>()),
      passed_(grants_, environment.lending) {
  traits_.preference = kPreference;
  traits_.grants = true;
  traits_.grant_bytes = kGrantBytes;
  traits_.loans = true;
  receiver_.set_max_frame(std::min(environment.limits.max_frame, kStrangerFrame));
}

ShmConnection::~ShmConnection() = default;

// The exception barrier of the connection: false if it has failed.
template <class Work>
bool ShmConnection::guarded(Work&& work) noexcept {
  return guard(work, [this](const Error& error) { fail(with_peer(error), false); });
}

void ShmConnection::start() {
  if (state_ == State::closed) return;  // the handler rejected it
  guarded([this] { watch_peer(); });
}

void ShmConnection::watch_peer() {
  environment_.loop.add(*this);
  const auto self = shared_from_this();
  socket_watch_ = environment_.loop.watch(socket_.get(), EPOLLIN,
                                          [self](std::uint32_t) { self->socket_ready(); });
  // The callback does nothing: the loop polls every ring after each wait.
  bell_watch_ = environment_.loop.watch(bell_.get(), EPOLLIN | EPOLLET, [self](std::uint32_t) {});
  if (pidfd_) {
    pidfd_watch_ = environment_.loop.watch(pidfd_->get(), EPOLLIN,
                                           [self](std::uint32_t) { self->peer_exited(); });
  }
  if (established_ || state_ != State::open) return;
  set_timer(environment_.handshake_timeout, [self] {
    self->fail(make_error(ErrorCode::timeout, "no greeting from " + self->peer_address_ +
                                                  " within the handshake's time limit"),
               false);
  });
}

void ShmConnection::establish() {
  if (state_ != State::open || established_) return;
  established_ = true;
  receiver_.set_max_frame(environment_.limits.max_frame);
  if (!end_of_file_) environment_.loop.cancel(timer_);
  guarded([this] {
    owner_.established(id_);
    for (io::DescriptorMessage& message : std::exchange(early_notices_, {})) {
      take_notice(std::move(message));
    }
  });
}

// --- sending

void ShmConnection::write(wire::Frame frame) {
  if (state_ != State::open || failed_) return;
  guarded([&] { queue_.push(std::move(frame)); });
}

void ShmConnection::flush() {
  if (state_ == State::open && !failed_) send_queued();
}

void ShmConnection::send_queued() {
  guarded([this] { write_queued(); });
}

void ShmConnection::write_queued() {
  queue_.write_to(writer_);
  // Room that appeared meanwhile is left to the loop, so that no caller stays here for long;
  // otherwise the reader rings when there is room.
  if (!queue_.empty() && !writer_.await_room()) environment_.loop.wake();
  if (state_ == State::open && queue_.ran_low()) {
    // Posted: the caller may be the handler itself, in the middle of a batch of writes.
    environment_.loop.post([self = shared_from_this()] {
      if (self->state_ == State::open) self->environment_.handler.writable(*self);
    });
  }
  if (queue_.empty() && state_ == State::closing) finish_close();
}

// --- receiving

bool ShmConnection::poll() {
  if (state_ == State::closed || failed_) return false;
  const auto keep = shared_from_this();
  bool something = false;
  if (!queue_.empty()) {
    const std::size_t before = queue_.bytes();
    send_queued();
    something = queue_.bytes() != before;
  }
  if (state_ != State::open || failed_) return something;
  guarded([&] {
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
  const bool something = receiver_.receive(reader_, kPollBudget);
  heard_ |= established && something;
  return something;
}

// --- segments

std::optional<Grant> ShmConnection::allocate_grant(std::size_t bytes) {
  if (state_ != State::open || failed_) return std::nullopt;
  std::optional<GrantPool::Block> block = grants_->allocate(bytes);
  // The peer must know the segment before it gets a grant in it.
  if (!block || !passed_.pass(socket_.get(), {Access::fill, block->place.segment})) {
    return std::nullopt;
  }
  if (!idle_timer_) retire_idle_grants();
  return Grant{block->place, std::move(block->memory)};
}

// Returns memory of unused grants to the system, here at once and at the peer after the next poll.
void ShmConnection::retire_idle_grants() {
  const bool again = grants_->retire_idle();
  idle_timer_.reset();
  if (!again) return;
  idle_timer_ = environment_.loop.at(io::now() + kIdle, [self = shared_from_this()] {
    if (self->state_ == State::open) self->guarded([&] { self->retire_idle_grants(); });
  });
}

void ShmConnection::fill_grant(const wire::GrantPlace& place, Buffer bytes) {
  if (state_ != State::open || failed_) return;
  learn({Access::fill, place.segment});
  filler_.begin(place, theirs_.at(place), std::move(bytes));
  environment_.loop.wake();
}

MutableBuffer ShmConnection::grant_memory(const wire::GrantPlace& place) {
  if (state_ != State::open || failed_) return {};
  learn({Access::fill, place.segment});
  return theirs_.at(place);
}

// The peer passes a segment through the socket before it writes a place in it into the ring.
void ShmConnection::learn(SegmentId segment) {
  if (!theirs_.knows(segment) && state_ == State::open && !failed_) take_notices();
}

bool ShmConnection::pass_segment(std::uint64_t segment) {
  if (state_ != State::open || failed_) return false;
  return passed_.pass(socket_.get(), to_read(segment), heard_ ? kMaxSegments : kMaxEarlyLoans);
}

Buffer ShmConnection::map_loan(const wire::LoanPlace& place) {
  learn(to_read(place.segment));
  return theirs_.at(place, socket_.get());
}

bool ShmConnection::share(const Uid& key, std::span<const int> descriptors) {
  if (state_ != State::open || failed_) return false;
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
  environment_.loop.post([self = shared_from_this(), key, passed] {
    if (self->state_ != State::open) return;
    self->environment_.handler.shared(*self, key, std::move(*passed));
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
  if (!queue_.empty() && !writer_.await_room()) return false;
  if (!filler_.idle()) return false;
  return state_ != State::open || reader_.prepare_sleep();
}

void ShmConnection::awake() {
  if (state_ == State::open) reader_.wake();
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
  const auto keep = shared_from_this();
  guarded([this] {
    if (!take_notices()) socket_ended();
  });
}

void ShmConnection::socket_ended() {
  if (state_ == State::closed) return;
  if (state_ == State::closing) return finish_close();
  environment_.loop.unwatch(std::exchange(socket_watch_, 0));
  end_of_file_ = true;
  read_to_the_end();
  if (state_ != State::open || failed_) return;
  const auto closed_by_peer = [self = shared_from_this()] {
    self->fail(make_error(ErrorCode::peer_lost,
                          "connection with " + self->peer_address_ + ": closed by the peer"),
               false);
  };
  if (peer_said_bye_ || !pidfd_) return closed_by_peer();
  set_timer(kProofOfDeath, closed_by_peer);
}

void ShmConnection::peer_exited() {
  const auto keep = shared_from_this();
  environment_.loop.unwatch(std::exchange(pidfd_watch_, 0));
  if (state_ == State::closing) return finish_close();
  read_to_the_end();
  fail(make_error(ErrorCode::peer_lost,
                  "connection with " + peer_address_ + ": its process has ended"),
       true);
}

void ShmConnection::close() {
  if (state_ != State::open) return;
  state_ = State::closing;
  receiver_.stop();
  const auto keep = shared_from_this();
  const auto linger = [&] {
    set_timer(kLinger, [self = keep] { self->finish_close(); });
    write_queued();
  };
  guard(linger, [this](const Error&) { finish_close(); });
}

void ShmConnection::finish_close() {
  const auto keep = shared_from_this();
  if (state_ == State::closed) return;
  drop();
  owner_.ended(id_);
}

void ShmConnection::make_room() {
  fail(make_error(ErrorCode::timeout,
                  "no greeting from " + peer_address_ + " before others wanted its place"),
       false);
}

void ShmConnection::drop() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  receiver_.stop();
  try_send_notice(socket_.get(), Notice{}, {});  // a peer that has closed first needs no farewell
  environment_.loop.remove(*this);
  environment_.loop.cancel(timer_);
  if (idle_timer_) environment_.loop.cancel(*std::exchange(idle_timer_, std::nullopt));
  if (socket_watch_ != 0) environment_.loop.unwatch(std::exchange(socket_watch_, 0));
  if (pidfd_watch_ != 0) environment_.loop.unwatch(std::exchange(pidfd_watch_, 0));
  if (bell_watch_ != 0) environment_.loop.unwatch(std::exchange(bell_watch_, 0));
  socket_.reset();
  pidfd_.reset();
  bell_.reset();
  peer_bell_.reset();
  queue_.clear();
  early_notices_.clear();
  filler_.clear();
  grants_->close();
}

void ShmConnection::abandon() noexcept {
  socket_.reset();
  if (pidfd_) pidfd_->reset();
  bell_.reset();
  peer_bell_.reset();
  theirs_.abandon();
}

void ShmConnection::fail(Error error, bool peer_dead) noexcept {
  if (state_ == State::closed || failed_) return;
  const bool tell = state_ == State::open;
  failed_ = true;
  receiver_.stop();
  // Only the loop reports it to the handler.
  const auto post = [&] {
    environment_.loop.post([self = shared_from_this(), error = std::move(error), tell, peer_dead] {
      self->end(error, tell, peer_dead);
    });
  };
  // If even that fails: the session notices the silence, and the peer the end of file.
  guard(post, [this](const Error&) { drop(); });
}

void ShmConnection::end(const Error& error, bool tell, bool peer_dead) {
  if (state_ == State::closed) return;
  const bool still_open = state_ == State::open;
  drop();
  owner_.ended(id_);
  if (tell && still_open) environment_.handler.closed(*this, error, peer_dead);
}

Error ShmConnection::with_peer(const Error& error) const {
  Error named = error;
  named.message = "connection with " + peer_address_ + " closed: " + error.message;
  return named;
}

void ShmConnection::set_timer(Duration after, std::function<void()> due) {
  environment_.loop.cancel(timer_);
  timer_ = environment_.loop.at(io::now() + after, std::move(due));
}

}  // namespace moolink::transport::shm
