#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "base/thread_safety.h"
#include "crypto/sha256.h"
#include "io/loop.h"
#include "transport/connection_base.h"
#include "transport/tcp/byte_stream.h"
#include "transport/tcp/read_ahead.h"

namespace moolink::transport::tcp {

class TcpConnection;

// A stream that the dialler makes for one of its connections.
struct StreamOffer {
  wire::ConnectionId connection = 0;  // its number at this side
  std::uint64_t theirs = 0;           // its number at the acceptor
  std::uint32_t index = 0;
  crypto::Digest key{};
};

// What a connection needs from its transport.
class Owner : public ConnectionOwner {
 public:
  // Why connections are not in TLS, for a peer that requires TLS.
  virtual std::string why_plain() const MOOLINK_LOCKED = 0;
  // It was never opened, and will not be.
  virtual void not_opened(TcpConnection& connection, const HandshakeFailure& failure)
      MOOLINK_LOCKED = 0;
  // Dials the connection's peer for a stream. A failed dial has no effect.
  virtual void dial_stream(TcpConnection& connection, const StreamOffer& offer) MOOLINK_LOCKED = 0;
  virtual TcpConnection* find(wire::ConnectionId id) MOOLINK_LOCKED = 0;
};

// One connected socket: a connection, or a stream of one (streams.cc).
class TcpConnection final : public ConnectionBase, private OwnFrames {
 public:
  // offer: this side dials a stream.
  TcpConnection(Environment& environment, Owner& owner, Descriptor socket, std::string dialled,
                std::optional<StreamOffer> offer = std::nullopt);
  ~TcpConnection() override;

  // Begins; the owner knows it by then.
  void start(std::unique_ptr<ByteStream> stream) MOOLINK_LOCKED;
  int socket() const { return socket_.get(); }
  bool is_for_stream() const { return offer_.has_value(); }
  std::size_t streams() const MOOLINK_LOCKED;  // the number of streams that have joined

  wire::PathKind path() const override { return wire::PathKind::tcp; }
  std::string local_address() const MOOLINK_LOCKED override;
  void write(wire::Frame frame) MOOLINK_LOCKED override;
  void flush() MOOLINK_LOCKED override;
  std::size_t queued_bytes() const MOOLINK_LOCKED override;
  bool writable() const MOOLINK_LOCKED override;
  void peers_have(std::uint64_t features) MOOLINK_LOCKED override;

  // The stream's turn on the other thread has ended.
  void turned() MOOLINK_LOCKED;
  // Closes at once without reporting it, while no turn of the stream runs. A connection that is
  // closing first sends as much as the socket takes.
  void stop() MOOLINK_LOCKED;
  void abandon() noexcept { socket_.reset(); }

 private:
  void begin(std::unique_ptr<ByteStream> stream) MOOLINK_LOCKED;
  void ready(std::uint32_t events) MOOLINK_LOCKED;
  void handle(std::uint32_t events) MOOLINK_LOCKED;
  void shake_hands() MOOLINK_LOCKED;
  void refuse_tls() MOOLINK_LOCKED;
  void say_in_plain(const std::string& text) MOOLINK_LOCKED;
  void receive() MOOLINK_LOCKED;
  void receive_frames() MOOLINK_LOCKED;
  void silence() MOOLINK_LOCKED override;
  void discard() MOOLINK_LOCKED;
  void send_queued() MOOLINK_LOCKED override;
  void update_watch() MOOLINK_LOCKED;
  void authenticated() MOOLINK_LOCKED override;
  void release() MOOLINK_LOCKED override;
  void not_opened(const Error& error) MOOLINK_LOCKED override;
  void end(const Error& error, bool peer_dead) MOOLINK_LOCKED override;
  void cut_off(const Error& error) MOOLINK_LOCKED override;
  void finish_close() MOOLINK_LOCKED override;

  // streams.cc
  bool takes(const wire::ReceivedFrame& frame) MOOLINK_LOCKED override;
  void chunk_apart(std::uint8_t way, const wire::ChunkHead& head, std::span<std::byte> target)
      MOOLINK_LOCKED override;
  void measure_wait() MOOLINK_LOCKED;
  void ask_for_streams() MOOLINK_LOCKED;
  void offer_streams() MOOLINK_LOCKED;
  void received_streams(const wire::Streams& streams) MOOLINK_LOCKED;
  void ask_to_join() MOOLINK_LOCKED;
  void received_join(const wire::Join& join) MOOLINK_LOCKED;
  // Whether the stream may take this place; `now`: what must be there.
  bool admits(const wire::Join& join, const TcpConnection* now) const MOOLINK_LOCKED;
  crypto::Digest proof_of(bool dialler, const crypto::Digest& key, const wire::Join& join) const
      MOOLINK_LOCKED;
  void take_place(TcpConnection& main, std::uint32_t index) MOOLINK_LOCKED;
  void become_stream() MOOLINK_LOCKED;
  static bool has_joined(const TcpConnection* stream) { return stream && stream->joined_; }
  TcpConnection* stream_for(const wire::Frame& frame) const MOOLINK_LOCKED;
  void write_apart(TcpConnection& stream, wire::Frame frame) MOOLINK_LOCKED;
  void expect(const wire::ChunkHead& head, std::span<std::byte> target) MOOLINK_LOCKED;
  void receive_apart() MOOLINK_LOCKED;
  std::vector<TcpConnection*> leave_streams() MOOLINK_LOCKED;
  void stream_ended(TcpConnection& main, const Error& error) MOOLINK_LOCKED;

  Owner& transport_;
  Descriptor socket_;
  std::unique_ptr<ByteStream> stream_;
  io::Loop::Watch watch_;
  bool blocked_ = false;  // the socket takes no more: another attempt is useless

  ReadAhead ahead_;
  bool begun_ = false;  // a byte has come

  // Of a connection: its streams.
  enum class Streams { none, possible, asked };  // asked: this side asked for them, or has an offer
  Streams streams_state_ = Streams::none;
  std::uint32_t most_streams_ = 0;  // this side's limit
  bool offered_ = false;            // the acceptor has sent its offer to this side
  bool within_host_ = false;
  Duration waited_{};                    // for the socket, in total
  Time waits_since_ = kNever;            // kNever: it does not wait
  crypto::Digest stream_key_{};          // the key of this acceptor's offer
  std::vector<TcpConnection*> streams_;  // by index; null: the place is free

  // Of a stream.
  std::optional<StreamOffer> offer_;  // at the dialler only
  // The connection that this stream belongs to; null: none yet. At the dialler it is set with the
  // JOIN, because chunks may be announced before the answer.
  TcpConnection* main_ = nullptr;
  bool joined_ = false;
  bool needed_ = false;  // joined, or a chunk was announced: its loss ends the connection
  std::uint32_t index_ = 0;
  bool greeted_ = false;  // a frame has come
  struct Announced {
    wire::ChunkHead head;
    std::byte* target;  // null: discarded
    std::size_t left;
  };
  std::deque<Announced> announced_;  // chunks whose bytes come next
};

}  // namespace moolink::transport::tcp
