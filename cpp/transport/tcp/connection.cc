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
constexpr std::size_t kHighWater = std::size_t{512} << 10;
constexpr std::size_t kLowWater = std::size_t{128} << 10;
constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::size_t kReadAhead = std::size_t{128} << 10;
constexpr std::size_t kReceiveBudget = std::size_t{512} << 10;  // of one readiness
constexpr int kUnsentInKernel = 256 << 10;
constexpr int kLocalWindow = 1 << 20;
constexpr std::size_t kGreetingAhead = std::size_t{2} << 10;  // beside one frame
constexpr int kDiscardsAtOnce = 64;

// Continues without options that the system refuses. Returns whether both ends are on this host.
bool tune(int fd) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentInKernel, sizeof kUnsentInKernel);
  if (!is_same_host(local_address(fd), remote_address(fd))) return false;
  // Within one host nothing is lost and pacing gains nothing, but costs BBR a third of its speed;
  // and a longer window only lets frames wait in the receiver's queue.
  constexpr std::string_view kUnpaced = "reno";
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
  setsockopt(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &kLocalWindow, sizeof kLocalWindow);
  return true;
}

}  // namespace

TcpConnection::TcpConnection(Environment& environment, Owner& owner, Descriptor socket,
                             std::string dialled, std::optional<StreamOffer> offer)
    : ConnectionBase(environment, owner, std::move(dialled), kLowWater, kHighWater, this),
      transport_(owner),
      socket_(std::move(socket)),
      ahead_(kGreetingAhead),
      offer_(offer) {
  peer_address_ = remote_address(socket_.get()).text();
  traits_.chunk_bytes = kChunk;
  within_host_ = tune(socket_.get());
}

TcpConnection::~TcpConnection() = default;

std::string TcpConnection::local_address() const {
  SocketAddress local = tcp::local_address(socket_.get());
  local.set_port(0);
  return local.text();
}

void TcpConnection::start(std::unique_ptr<ByteStream> stream) {
  const auto keep = shared_from_this();
  guarded([&]() MOOLINK_LOCKED { begin(std::move(stream)); });
}

void TcpConnection::begin(std::unique_ptr<ByteStream> stream) {
  stream_ = std::move(stream);
  traits_.cipher = stream_->cipher();
  watch_ = environment_.loop.watch(socket_.get(), EPOLLIN,
                                   [this, self = shared_from_this()](std::uint32_t e)
                                       MOOLINK_LOCKED { ready(e); });
  await_greeting();
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
    return transport_.not_opened(*this, failure);
  }
  traits_.binding = stream_->binding();
  offer_ ? ask_to_join() : open();
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
  const std::string why = transport_.why_plain();
  say_in_plain(why);
  environment_.handler.closed(
      *this,
      make_error(ErrorCode::auth, "the connection with " + peer_address_ + " is refused: " + why),
      false);
}

void TcpConnection::authenticated() {
  ahead_.grow(kReadAhead);
  owner_.established(id());
}

void TcpConnection::ready(std::uint32_t events) {
  if (failed_) return;
  const auto keep = shared_from_this();
  guarded([&]() MOOLINK_LOCKED { handle(events); });
}

void TcpConnection::handle(std::uint32_t events) {
  if (state_ == State::open && !opened_) return shake_hands();
  if ((events & EPOLLOUT) != 0) send_queued();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return;
  if (joined_ && announced_.empty()) {  // otherwise reading finds the end
    // A closing connection has dropped its announced chunks: their bytes are not read.
    if ((events & (EPOLLHUP | EPOLLERR)) == 0) return update_watch();
    return fail(make_error(ErrorCode::peer_lost, "closed by the peer"));
  }
  if (state_ == State::open) receive();
  if (state_ == State::closing) discard();
}

// --- sending

void TcpConnection::write(wire::Frame frame) {
  if (!usable()) return;
  guarded([&]() MOOLINK_LOCKED {
    if (TcpConnection* stream = stream_for(frame)) return write_apart(*stream, std::move(frame));
    queue_.push(std::move(frame));
  });
}

void TcpConnection::flush() {
  if (!usable()) return;
  if (!queue_.empty() && !blocked_) ConnectionBase::flush();
  for (TcpConnection* stream : streams_) {
    if (stream != nullptr) stream->flush();
  }
}

void TcpConnection::send_queued() {
  measure_wait();
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
  const bool may_ask = streams_state_ == Streams::possible && most_streams_ > 0;
  if (blocked_ && may_ask) waits_since_ = io::now();
  update_watch();
  tell_writable(main_ != nullptr ? *main_ : *this);
}

void TcpConnection::update_watch() {
  const bool full = stream_->unsent() || (!queue_.empty() && !stream_->busy());
  // The bytes of chunks stay in the socket until the chunks are announced.
  const bool reads = stream_->takes_input() && (!joined_ || !announced_.empty());
  environment_.loop.change(watch_, (full ? EPOLLOUT : 0U) | (reads ? EPOLLIN : 0U));
}

void TcpConnection::turned() {
  if (state_ == State::closed || failed_) return;
  const auto keep = shared_from_this();
  guarded([this]() MOOLINK_LOCKED {
    stream_->turned();
    send_queued();
    if (state_ == State::open) receive();
  });
}

// --- receiving

void TcpConnection::receive() {
  const auto keep = shared_from_this();
  guarded([this]() MOOLINK_LOCKED {
    ahead_.begin(*stream_, kReceiveBudget);
    if (!joined_) receive_frames();
    if (joined_) receive_apart();
    if (!usable()) return;
    if (ahead_.ended()) {
      fail(make_error(ErrorCode::peer_lost,
                      "connection with " + peer_address_ + ": closed by the peer"));
    } else {
      update_watch();
    }
  });
}

void TcpConnection::receive_frames() {
  if (!begun_) {
    const auto first = ahead_.peek();
    if (first && stream_->cipher().empty() && begins_tls(*first)) return refuse_tls();
    begun_ = first.has_value();
  }
  while (receiver_.receive(ahead_, std::numeric_limits<std::size_t>::max())) {
  }
}

// For a connection that is being closed: until the peer closes too.
void TcpConnection::discard() {
  std::array<std::byte, kGreetingFrame> bytes;
  const iovec all{bytes.data(), bytes.size()};
  for (int left = kDiscardsAtOnce; left > 0; --left) {
    const ssize_t count = receive_pieces(socket_.get(), std::span(&all, 1));
    if (count < 0 && would_block(errno)) return;
    if (count <= 0) return finish_close();
  }
}

// --- the end

void TcpConnection::stop() {
  if (state_ == State::closing) turned();
  drop();
}

void TcpConnection::release() {
  watch_.reset();
  socket_.reset();
  leave_streams();
}

// From now on, nothing is received into the handler's memory.
void TcpConnection::silence() {
  receiver_.stop();
  announced_.clear();
  for (TcpConnection* stream : streams_) {
    if (stream != nullptr) stream->announced_.clear();
  }
}

void TcpConnection::finish_close() {
  const std::vector<TcpConnection*> streams = leave_streams();
  ConnectionBase::finish_close();
  for (TcpConnection* stream : streams) stream->finish_close();
}

void TcpConnection::cut_off(const Error& error) {
  TcpConnection* const main = main_;
  drop();
  if (main != nullptr) main->fail(error);
}

void TcpConnection::not_opened(const Error& error) {
  transport_.not_opened(*this, HandshakeFailure(error));
}

void TcpConnection::end(const Error& error, bool peer_dead) {
  if (main_ != nullptr && needed_) return stream_ended(*main_, error);
  if (offer_) return finish_close();
  ConnectionBase::end(error, peer_dead);
}

}  // namespace moolink::transport::tcp
