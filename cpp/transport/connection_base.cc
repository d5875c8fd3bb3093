#include "transport/connection_base.h"

#include <algorithm>

namespace moolink::transport {
namespace {

constexpr Duration kIdle = seconds(5);  // memory unused for one to two such periods is returned

}  // namespace

ConnectionBase::ConnectionBase(Environment& environment, ConnectionOwner& owner,
                               std::string dialled, std::size_t low_water, std::size_t high_water,
                               OwnFrames* own)
    : environment_(environment),
      owner_(owner),
      id_(environment.next_connection_id()),
      dialled_(std::move(dialled)),
      queue_(low_water, high_water),
      receiver_(environment, *this, own) {
  receiver_.set_max_frame(std::min(environment.limits.max_frame, kGreetingFrame));
}

Error ConnectionBase::with_peer(const Error& error) const {
  Error named = error;
  named.message = "connection with " + peer_address_ + " closed: " + error.message;
  return named;
}

// --- the beginning

void ConnectionBase::await_greeting() {
  greeting_timer_ = environment_.loop.timer(
      io::now() + environment_.handshake_timeout, [self = shared_from_this()]() MOOLINK_LOCKED {
        self->fail(make_error(ErrorCode::timeout, "no greeting from " + self->peer_address_ +
                                                      " within the handshake's time limit"));
      });
}

void ConnectionBase::make_room() {
  fail(make_error(ErrorCode::timeout,
                  "no greeting from " + peer_address_ + " before its place was needed"));
}

void ConnectionBase::open() {
  told_ = true;  // also if it throws: the handler may have the connection already
  environment_.handler.opened(shared_from_this(), dialled_);
  opened_ = true;
}

void ConnectionBase::establish() {
  if (!usable() || std::exchange(established_, true)) return;
  receiver_.set_max_frame(environment_.limits.max_frame);
  greeting_timer_.reset();
  guarded([this]() MOOLINK_LOCKED { authenticated(); });
}

// --- sending

void ConnectionBase::write(wire::Frame frame) {
  if (usable()) guarded([&] { queue_.push(std::move(frame)); });
}

void ConnectionBase::flush() {
  if (usable()) guarded([this]() MOOLINK_LOCKED { send_queued(); });
}

bool ConnectionBase::send_some() {
  const std::size_t before = queue_.bytes();
  send_queued();
  return queue_.bytes() != before;
}

void ConnectionBase::tell_writable(ConnectionBase& of) {
  if (state_ != State::open || !queue_.ran_low()) return;
  // Posted: the caller may be the handler itself, in the middle of a batch of writes.
  environment_.loop.post([self = of.shared_from_this()]() MOOLINK_LOCKED {
    if (self->state_ == State::open) self->environment_.handler.writable(*self);
  });
}

void ConnectionBase::watch_idle_grants() {
  if (idle_timer_ || !retire_grants()) return;
  idle_timer_ =
      environment_.loop.timer(io::now() + kIdle, [self = shared_from_this()]() MOOLINK_LOCKED {
        self->idle_timer_.reset();
        if (!self->usable()) return;
        self->guarded([&]() MOOLINK_LOCKED { self->watch_idle_grants(); });
      });
}

// --- the end

void ConnectionBase::close() {
  if (state_ == State::open) begin_closing();
}

void ConnectionBase::begin_closing() {
  const auto keep = shared_from_this();
  state_ = State::closing;
  greeting_timer_.reset();
  silence();
  const auto linger = [this, keep]() MOOLINK_LOCKED {
    timer_ = environment_.loop.timer(io::now() + kLinger,
                                     [keep]() MOOLINK_LOCKED { keep->finish_close(); });
    send_queued();
  };
  guard(linger, [this](const Error&) MOOLINK_LOCKED { finish_close(); });
}

void ConnectionBase::fail(Error error, bool peer_dead) noexcept {
  if (state_ == State::closed || failed_) return;
  failed_ = true;
  silence();
  post_end(error, peer_dead);
}

// If both attempts fail: the session notices the silence, and the peer the end of file.
void ConnectionBase::post_end(const Error& error, bool peer_dead) noexcept {
  const auto post = [&] {
    environment_.loop.post([self = shared_from_this(), error, peer_dead]()
                               MOOLINK_LOCKED { self->end(error, peer_dead); });
  };
  guard(post,
        [&](const Error&) { guard(post, [&](const Error& why) MOOLINK_LOCKED { cut_off(why); }); });
}

void ConnectionBase::end(const Error& error, bool peer_dead) {
  const bool was_open = state_ == State::open;
  finish_close();
  if (!was_open) return;
  if (!opened_) not_opened(error);
  if (told_) environment_.handler.closed(*this, error, peer_dead);
}

void ConnectionBase::not_opened(const Error& error) {
  if (!dialled_.empty()) environment_.handler.dial_failed(dialled_, error);
}

void ConnectionBase::finish_close() {
  if (state_ == State::closed) return;
  const auto keep = shared_from_this();
  drop();
  owner_.ended(id_);
}

void ConnectionBase::drop() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  silence();
  greeting_timer_.reset();
  timer_.reset();
  idle_timer_.reset();
  release();
  queue_.clear();
}

}  // namespace moolink::transport
