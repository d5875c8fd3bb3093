// The streams of a connection: further sockets between its two ends, for the bytes of large chunks.
// The connection's own socket carries the head of such a chunk, with the number of its stream.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/system_error.h"
#include "transport/tcp/connection.h"

namespace moolink::transport::tcp {
namespace {

constexpr std::uint32_t kMostStreams = 16;
// Smaller chunks go on the connection's own socket, so that they do not wait for larger ones.
constexpr std::size_t kLeastApart = std::size_t{64} << 10;
// Chunks announced on one stream and not received: over 256 MB. Honest peers have fewer in transit.
constexpr std::size_t kMostAnnounced = 4096;
// Nothing else detects the loss of one stream's packets: the connection itself stays alive.
constexpr unsigned kUnacknowledgedMs = 5000;
constexpr int kKeepAliveSeconds = 60;  // so that firewalls do not forget an idle stream

crypto::Digest random_key() {
  crypto::Digest key;
  if (getrandom(key.data(), key.size(), 0) != static_cast<ssize_t>(key.size())) {
    throw_system_error("getrandom");
  }
  return key;
}

}  // namespace

// --- when

void TcpConnection::peers_have(std::uint64_t features) {
  if ((features & wire::kStreamsFeature) == 0) return;
  streams_state_ = Streams::possible;
  const StreamSettings& settings = environment_.streams;
  if (within_host_ && !settings.within_host) return;
  most_streams_ = static_cast<std::uint32_t>(std::min<std::size_t>(settings.most, kMostStreams));
}

// Adds up the time in which there was more to send than the socket took: more sockets may help.
void TcpConnection::measure_wait() {
  if (waits_since_ == kNever) return;
  waited_ += io::now() - std::exchange(waits_since_, kNever);
  if (waited_ >= environment_.streams.after) ask_for_streams();
}

void TcpConnection::ask_for_streams() {
  if (state_ != State::open || streams_state_ != Streams::possible) return;
  if (dialled().empty()) return offer_streams();
  streams_state_ = Streams::asked;
  queue_.push(wire::make_frame(wire::FrameType::streams, wire::Streams{}));
}

// The acceptor makes the key. Only the two ends of this connection know it.
void TcpConnection::offer_streams() {
  streams_state_ = Streams::asked;
  stream_key_ = random_key();
  streams_.resize(most_streams_);
  queue_.push(
      wire::make_frame(wire::FrameType::streams, wire::Streams{id(), most_streams_, stream_key_}));
}

// --- joining

bool TcpConnection::takes(const wire::ReceivedFrame& frame) {
  const bool first = !std::exchange(greeted_, true);
  if (frame.header.type == wire::FrameType::streams) {
    received_streams(wire::decode_control<wire::Streams>(frame));
  } else if (frame.header.type == wire::FrameType::join) {
    if (!first) wire::fail("JOIN that is not the first frame");
    received_join(wire::decode_control<wire::Join>(frame));
  } else if (offer_) {
    wire::fail("a frame other than JOIN on a stream");
  } else {
    return false;
  }
  return true;
}

void TcpConnection::received_streams(const wire::Streams& streams) {
  const bool request = streams.connection == 0;
  if (streams_state_ == Streams::none || request != dialled().empty() || offer_) {
    wire::fail("STREAMS from a side that may not send it");
  }
  if (request) {
    if (streams_state_ == Streams::possible) offer_streams();
    return flush();
  }
  if (std::exchange(offered_, true)) wire::fail("a second offer of streams");
  streams_state_ = Streams::asked;
  streams_.resize(std::min(streams.count, most_streams_));
  for (std::uint32_t index = 0; index < streams_.size(); ++index) {
    transport_.dial_stream(*this, {id(), streams.connection, index, streams.key});
  }
}

// The proof is valid on this socket and for this side only.
crypto::Digest TcpConnection::proof_of(bool dialler, const crypto::Digest& key,
                                       const wire::Join& join) const {
  wire::Join proven = join;
  proven.proof = traits_.binding;
  std::string text(dialler ? "moolink stream: dialler" : "moolink stream: acceptor");
  const Buffer fields = wire::encode(proven);
  text.append(reinterpret_cast<const char*>(fields.data()), fields.size());
  return crypto::hmac_sha256(key, crypto::bytes_of(text));
}

void TcpConnection::ask_to_join() {
  wire::Join join{offer_->theirs, offer_->index, {}};
  TcpConnection* const main = transport_.find(offer_->connection);
  if (main == nullptr || !main->admits(join, nullptr)) {
    wire::fail("a stream whose connection has ended");
  }
  take_place(*main, join.index);
  join.proof = proof_of(true, offer_->key, join);
  queue_.push(wire::make_frame(wire::FrameType::join, join));
  send_queued();
}

bool TcpConnection::admits(const wire::Join& join, const TcpConnection* now) const {
  return usable() && main_ == nullptr && join.index < streams_.size() &&
         streams_[join.index] == now;
}

void TcpConnection::received_join(const wire::Join& join) {
  if (!offer_ && !dialled().empty()) wire::fail("JOIN from an acceptor");
  if (offer_ && (join.connection != offer_->theirs || join.index != offer_->index)) {
    wire::fail("an answer to the JOIN of another stream");
  }
  TcpConnection* const main = transport_.find(offer_ ? offer_->connection : join.connection);
  const bool wanted = main != nullptr && main->dialled().empty() == !offer_ &&
                      main->admits(join, offer_ ? this : nullptr);
  if (!wanted) wire::fail("JOIN of an unknown connection or index");
  const crypto::Digest& key = offer_ ? offer_->key : main->stream_key_;
  if (!crypto::equal(join.proof, proof_of(!offer_, key, join)))
    wire::fail("JOIN with a wrong proof");
  if (!offer_) {
    take_place(*main, join.index);
    wire::Join answer = join;
    answer.proof = proof_of(false, key, join);
    queue_.push(wire::make_frame(wire::FrameType::join, answer));
  }
  become_stream();
  if (offer_) return;
  environment_.handler.closed(
      *this, make_error(ErrorCode::closed, "the socket became a stream of another connection"),
      false);
}

void TcpConnection::take_place(TcpConnection& main, std::uint32_t index) {
  main_ = &main;
  index_ = index;
  main.streams_[index] = this;
}

void TcpConnection::become_stream() {
  receiver_.stop();
  greeting_timer_.reset();
  established_ = joined_ = needed_ = true;
  owner_.established(id());
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnacknowledgedMs,
             sizeof kUnacknowledgedMs);
  const int one = 1;
  setsockopt(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_KEEPIDLE, &kKeepAliveSeconds,
             sizeof kKeepAliveSeconds);
  send_queued();
}

std::size_t TcpConnection::streams() const {
  return static_cast<std::size_t>(std::ranges::count_if(streams_, has_joined));
}

// --- sending

std::size_t TcpConnection::queued_bytes() const {
  std::size_t bytes = queue_.bytes();
  for (const TcpConnection* stream : streams_) bytes += stream ? stream->queue_.bytes() : 0;
  return bytes;
}

bool TcpConnection::writable() const {
  const auto has_room = [](const TcpConnection* stream) {
    return has_joined(stream) && !stream->queue_.full();
  };
  return !queue_.full() && (streams() == 0 || std::ranges::any_of(streams_, has_room));
}

// The stream with the fewest queued bytes; null: the frame is not for a stream, or none has joined.
TcpConnection* TcpConnection::stream_for(const wire::Frame& frame) const {
  if (frame.header.type != wire::FrameType::chunk) return nullptr;
  if (frame.header.length - frame.header.control < kLeastApart) return nullptr;
  TcpConnection* best = nullptr;
  for (TcpConnection* stream : streams_) {
    if (!has_joined(stream)) continue;
    if (best == nullptr || stream->queue_.bytes() < best->queue_.bytes()) best = stream;
  }
  return best;
}

void TcpConnection::write_apart(TcpConnection& stream, wire::Frame frame) {
  frame.header.flags = static_cast<std::uint8_t>(stream.index_ + 1);
  frame.header.length = frame.header.control;
  stream.queue_.push(std::exchange(frame.payload, {}));
  queue_.push(std::move(frame));
}

// --- receiving

void TcpConnection::chunk_apart(std::uint8_t way, const wire::ChunkHead& head,
                                std::span<std::byte> target) {
  const std::size_t index = std::size_t{way} - 1;
  if (index >= streams_.size() || streams_[index] == nullptr)
    wire::fail("a chunk on an unknown stream");
  if (head.bytes < kLeastApart || head.bytes > environment_.limits.max_frame) {
    wire::fail("a chunk on a stream, too small or too large for one");
  }
  streams_[index]->expect(head, target);
}

void TcpConnection::expect(const wire::ChunkHead& head, std::span<std::byte> target) {
  if (announced_.size() >= kMostAnnounced) wire::fail("too many announced chunks on a stream");
  needed_ = true;
  announced_.push_back({head, target.data(), static_cast<std::size_t>(head.bytes)});
  if (announced_.size() > 1) return;
  // Its bytes may already be in the read-ahead.
  environment_.loop.post([this, self = shared_from_this()]() MOOLINK_LOCKED {
    if (joined_ && usable()) receive();
  });
}

void TcpConnection::receive_apart() {
  while (!announced_.empty()) {
    Announced& next = announced_.front();
    const std::size_t got =
        next.target == nullptr ? ahead_.skip(next.left) : ahead_.read({next.target, next.left});
    if (got == 0) return;
    next.left -= got;
    if (next.target != nullptr) next.target += got;
    if (next.left > 0) continue;
    const wire::ChunkHead head = next.head;
    announced_.pop_front();
    environment_.handler.chunk_received(*main_, head);
  }
}

// --- the end

// Detaches the streams and returns them. A stream detaches itself from its connection.
std::vector<TcpConnection*> TcpConnection::leave_streams() {
  std::vector<TcpConnection*> streams = std::exchange(streams_, {});
  std::erase(streams, nullptr);
  for (TcpConnection* stream : streams) stream->main_ = nullptr;
  if (main_ != nullptr) std::exchange(main_, nullptr)->streams_[index_] = nullptr;
  return streams;
}

// The connection of a lost stream is lost. First it reads what has come: the peer may have sent the
// reason.
void TcpConnection::stream_ended(TcpConnection& main, const Error& error) {
  const auto keep = main.shared_from_this();
  if (main.usable()) main.receive();
  if (state_ != State::closed) finish_close();
  if (main.usable()) main.fail(error);
}

}  // namespace moolink::transport::tcp
