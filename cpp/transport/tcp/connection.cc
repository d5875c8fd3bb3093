#include "transport/tcp/connection.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <string_view>
#include <utility>

#include "base/barrier.h"
#include "transport/tcp/address.h"
#include "transport/tcp/tls.h"

namespace moolink::transport::tcp {
namespace {

constexpr std::size_t kMaxVectors = 64;
// A small frame waits for the frames queued before it, here and in both kernels, and other threads
// of this process wait for the engine's lock, which is held while bytes are copied: each wait is
// bounded, at a fraction of a millisecond.
constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::size_t kReadAhead = std::size_t{128} << 10;
constexpr std::size_t kReceiveBudget = std::size_t{512} << 10;  // of one readiness
constexpr int kUnsentInKernel = 256 << 10;
constexpr int kLocalWindow = 1 << 20;
constexpr std::size_t kStrangerFrame = std::size_t{16} << 10;  // many times a greeting
constexpr std::size_t kStrangerAhead = std::size_t{2} << 10;   // beside one frame
constexpr int kDiscardsAtOnce = 64;
constexpr Duration kLinger = seconds(1);

// Continues without options that the system refuses.
void tune(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentInKernel, sizeof kUnsentInKernel);
  if (!is_same_host(local_address(fd), remote_address(fd))) return;
  // Within one host nothing is lost and pacing gains nothing, but costs BBR a third of its speed;
  // and a longer window only lets frames wait in the receiver's queue.
  constexpr std::string_view kUnpaced = "reno";
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
  setsockopt(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &kLocalWindow, sizeof kLocalWindow);
}

}  // namespace

TcpConnection::TcpConnection(Environment& environment, Owner& owner, Descriptor socket,
                             std::string dialled)
    : environment_(environment),
      owner_(owner),
      id_(environment.next_connection_id()),
      socket_(std::move(socket)),
      dialled_(std::move(dialled)),
      ahead_(kStrangerAhead),
      receiver_(environment, *this) {
  receiver_.set_max_frame(std::min(environment.limits.max_frame, kStrangerFrame));
  peer_address_ = remote_address(socket_.get()).text();
  traits_.chunk_bytes = kChunk;
  tune(socket_.get());
}

TcpConnection::~TcpConnection() = default;

std::string TcpConnection::local_address() const {
  SocketAddress local = tcp::local_address(socket_.get());
  local.set_port(0);
  return local.text();
}

// The exception barrier of the connection: false if it has failed.
template <class Work>
bool TcpConnection::guarded(Work&& work) noexcept {
  return guard(work, [this](Error error) {
    error.message = "connection with " + peer_address_ + " closed: " + error.message;
    fail(std::move(error));
  });
}

void TcpConnection::start(std::unique_ptr<ByteStream> stream) {
  const auto keep = shared_from_this();
  guarded([&] { begin(std::move(stream)); });
}

void TcpConnection::begin(std::unique_ptr<ByteStream> stream) {
  stream_ = std::move(stream);
  traits_.cipher = stream_->cipher();
  watch_ = environment_.loop.watch(
      socket_.get(), EPOLLIN, [self = shared_from_this()](std::uint32_t e) { self->ready(e); });
  timer_ =
      environment_.loop.at(io::now() + environment_.handshake_timeout, [self = shared_from_this()] {
        self->fail(make_error(ErrorCode::timeout, "no greeting from " + self->peer_address_ +
                                                      " within the handshake's time limit"));
      });
  shake_hands();
}

// --- before it is open

void TcpConnection::shake_hands() {
  const auto keep = shared_from_this();
  try {
    if (!stream_->shake_hands()) return update_watch();
  } catch (const std::exception& e) {
    const auto* known = dynamic_cast<const HandshakeFailure*>(&e);
    HandshakeFailure failure = known ? *known : HandshakeFailure(ErrorCode::error, e.what());
    say_in_plain(failure.answer);
    return owner_.not_opened(*this, failure);
  }
  traits_.binding = stream_->binding();
  owner_.opened(*this);
  opened_ = true;
  // Bytes that arrived with the end of the handshake are not in the socket any more.
  if (state_ == State::open && stream_->holds_bytes()) receive();
}

// The last message, if the other side does not use TLS, or its alert would say too little.
void TcpConnection::say_in_plain(const std::string& text) {
  stream_ = std::make_unique<PlainStream>(socket_.get());
  if (!text.empty()) {
    write(wire::make_frame(wire::FrameType::refuse,
                           wire::Refuse{ErrorCode::auth, text, environment_.name}));
  }
  begin_closing();
}

// A peer with a token has connected to one that does not encrypt.
void TcpConnection::refuse_tls() {
  const std::string why = owner_.why_plain();
  say_in_plain(why);
  environment_.handler.closed(
      *this,
      make_error(ErrorCode::auth, "the connection with " + peer_address_ + " is refused: " + why),
      false);
}

void TcpConnection::establish() {
  if (state_ != State::open || established_) return;
  established_ = true;
  receiver_.set_max_frame(environment_.limits.max_frame);
  ahead_.grow(kReadAhead);
  environment_.loop.cancel(timer_);
  guarded([this] { owner_.established(id_); });
}

void TcpConnection::ready(std::uint32_t events) {
  const auto keep = shared_from_this();
  guarded([&] { handle(events); });
}

void TcpConnection::handle(std::uint32_t events) {
  if (state_ == State::open && !opened_) return shake_hands();
  if ((events & EPOLLOUT) != 0) send_queued();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  if (state_ == State::open) receive();
  if (state_ == State::closing) discard();
}

// --- sending

void TcpConnection::write(wire::Frame frame) {
  if (state_ != State::open) return;
  guarded([&] { queue_.push(std::move(frame)); });
}

void TcpConnection::flush() {
  if (state_ != State::open || queue_.empty() || blocked_ || failure_posted_) return;
  guarded([this] { send_queued(); });
}

void TcpConnection::send_queued() {
  blocked_ = false;
  try {
    while (!blocked_ && (!queue_.empty() || stream_->unsent())) {
      std::array<iovec, kMaxVectors> vectors;
      const std::size_t used = queue_.gather(vectors);
      const ByteStream::Sent taken = stream_->send(std::span(vectors).first(used));
      queue_.sent(taken.bytes);
      blocked_ = taken.full;
    }
    if (state_ == State::closing && queue_.empty()) blocked_ = !stream_->shut_down();
  } catch (const Exception& e) {
    Error error = e.error();
    error.message = "connection to " + peer_address_ + " failed: " + error.message;
    return fail(std::move(error));
  }
  update_watch();
  if (state_ == State::open && queue_.ran_low()) {
    // Posted: the caller may be the handler itself, in the middle of a batch of writes.
    environment_.loop.post([self = shared_from_this()] {
      if (self->state_ == State::open) self->environment_.handler.writable(*self);
    });
  }
}

void TcpConnection::update_watch() {
  const bool full = stream_->unsent() || (!queue_.empty() && !stream_->busy());
  environment_.loop.change(watch_,
                           (full ? EPOLLOUT : 0U) | (stream_->takes_input() ? EPOLLIN : 0U));
}

void TcpConnection::turned() {
  if (state_ == State::closed || failure_posted_) return;
  const auto keep = shared_from_this();
  guarded([this] {
    stream_->turned();
    send_queued();
    if (state_ == State::open) receive();
  });
}

// --- receiving

void TcpConnection::receive() {
  const auto keep = shared_from_this();
  guarded([this] {
    ahead_.begin(*stream_, kReceiveBudget);
    if (!begun_) {
      const auto first = ahead_.peek();
      if (first && stream_->cipher().empty() && begins_tls(*first)) return refuse_tls();
      begun_ = first.has_value();
    }
    while (receiver_.receive(ahead_, std::numeric_limits<std::size_t>::max())) {
    }
    if (state_ != State::open || failure_posted_) return;
    if (ahead_.ended()) {
      fail(make_error(ErrorCode::peer_lost,
                      "connection with " + peer_address_ + ": closed by the peer"));
    } else {
      update_watch();
    }
  });
}

// For a connection that is being closed: until the peer closes too.
void TcpConnection::discard() {
  std::array<std::byte, kStrangerFrame> bytes;
  const iovec all{bytes.data(), bytes.size()};
  for (int left = kDiscardsAtOnce; left > 0; --left) {
    const ssize_t count = receive_pieces(socket_.get(), std::span(&all, 1));
    if (count < 0 && would_block(errno)) return;
    if (count <= 0) return finish_close();
  }
}

// --- the end

void TcpConnection::close() {
  if (state_ != State::open) return;
  begin_closing();
}

void TcpConnection::begin_closing() {
  state_ = State::closing;
  receiver_.stop();
  environment_.loop.cancel(timer_);
  const auto keep = shared_from_this();
  guard([this] { linger(); }, [this](const Error&) { finish_close(); });
}

void TcpConnection::linger() {
  timer_ = environment_.loop.at(io::now() + kLinger,
                                [self = shared_from_this()] { self->finish_close(); });
  // The peer may still be sending: closing now would answer it with a reset, which can destroy the
  // last bytes sent (the reason of a refusal). So: send, shut down, read until the peer closes.
  send_queued();
}

void TcpConnection::make_room() {
  fail(make_error(ErrorCode::timeout,
                  "no greeting from " + peer_address_ + " before others wanted its place"));
}

void TcpConnection::stop() {
  if (state_ == State::closing) turned();
  drop();
}

void TcpConnection::drop() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  environment_.loop.cancel(timer_);
  environment_.loop.unwatch(watch_);
  socket_.reset();
  queue_.clear();
  receiver_.stop();
}

void TcpConnection::finish_close() {
  const auto keep = shared_from_this();
  drop();
  owner_.ended(id_);
}

void TcpConnection::fail(Error error) noexcept {
  if (state_ == State::closed || failure_posted_) return;
  const bool tell = state_ == State::open;
  failure_posted_ = true;
  receiver_.stop();
  // Nothing is received or sent any more, but only the loop reports it to the handler.
  environment_.loop.unwatch(watch_);
  const auto post = [&] {
    environment_.loop.post(
        [self = shared_from_this(), error = std::move(error), tell] { self->end(error, tell); });
  };
  // If even that fails: the session notices the silence, and the peer the end of file.
  guard(post, [this](const Error&) { drop(); });
}

void TcpConnection::end(const Error& error, bool tell) {
  if (state_ == State::closed) return;
  const bool still_open = state_ == State::open;
  finish_close();
  if (!tell || !still_open) return;
  if (!opened_) return owner_.not_opened(*this, HandshakeFailure(error));
  environment_.handler.closed(*this, error, false);
}

}  // namespace moolink::transport::tcp
