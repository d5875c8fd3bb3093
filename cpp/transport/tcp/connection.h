#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "io/loop.h"
#include "transport/frame_receiver.h"
#include "transport/send_queue.h"
#include "transport/tcp/read_ahead.h"
#include "transport/tcp/stream.h"
#include "transport/transport.h"

namespace moolink::transport::tcp {

class TcpConnection;

// What a connection needs from its transport.
class Owner {
 public:
  virtual ~Owner() = default;
  // The connection is over and its socket closed; the owner forgets it.
  virtual void ended(wire::ConnectionId id) = 0;
  // Its peer is authenticated.
  virtual void established(wire::ConnectionId id) = 0;
  // It can carry frames: report it to the handler.
  virtual void opened(TcpConnection& connection) = 0;
  // Why connections are not in TLS, for a peer that requires TLS.
  virtual std::string why_plain() const = 0;
  // It was never opened, and will not be.
  virtual void not_opened(TcpConnection& connection, const HandshakeFailure& failure) = 0;
};

// One connected socket.
class TcpConnection final : public Connection, public std::enable_shared_from_this<TcpConnection> {
 public:
  TcpConnection(Environment& environment, Owner& owner, Descriptor socket, std::string dialled);
  ~TcpConnection() override;

  // Begins; the owner knows it by then.
  void start(std::unique_ptr<ByteStream> stream);
  int socket() const { return socket_.get(); }
  const std::string& dialled() const { return dialled_; }  // empty: accepted

  wire::ConnectionId id() const override { return id_; }
  wire::PathKind path() const override { return wire::PathKind::tcp; }
  const wire::PathTraits& traits() const override { return traits_; }
  const std::string& peer_address() const override { return peer_address_; }
  std::string local_address() const override;
  void write(wire::Frame frame) override;
  void flush() override;
  std::size_t queued_bytes() const override { return queue_.bytes(); }
  bool writable() const override { return !queue_.full(); }
  void establish() override;
  void close() override;

  // Ends it, and reports the error to the handler, or to the owner if it was never opened.
  void fail(Error error) noexcept;
  // The stream's turn on the other thread has ended.
  void turned();
  // Fails an unauthenticated connection to make room for others.
  void make_room();
  // Closes at once without reporting it, while no turn of the stream runs. A connection that is
  // closing first sends as much as the socket takes.
  void stop();
  // Closes at once without reporting it.
  void drop();
  void abandon() noexcept { socket_.reset(); }

 private:
  enum class State { open, closing, closed };

  template <class Work>
  bool guarded(Work&& work) noexcept;
  void begin(std::unique_ptr<ByteStream> stream);
  void ready(std::uint32_t events);
  void handle(std::uint32_t events);
  void shake_hands();
  void refuse_tls();
  void say_in_plain(const std::string& text);
  void begin_closing();
  void receive();
  void discard();
  void send_queued();
  void update_watch();
  void linger();
  void finish_close();
  void end(const Error& error, bool tell);

  // A small frame waits for the frames queued before it.
  static constexpr std::size_t kHighWater = std::size_t{512} << 10;
  static constexpr std::size_t kLowWater = std::size_t{128} << 10;

  Environment& environment_;
  Owner& owner_;
  const wire::ConnectionId id_;
  wire::PathTraits traits_;
  Descriptor socket_;
  const std::string dialled_;
  std::unique_ptr<ByteStream> stream_;
  bool opened_ = false;       // the handler knows it
  bool established_ = false;  // ... and the identity at the other end
  std::string peer_address_;
  State state_ = State::open;
  io::Loop::WatchId watch_ = 0;
  io::Loop::TimerKey timer_{};  // handshake, then the end of closing
  bool failure_posted_ = false;

  SendQueue queue_{kLowWater, kHighWater};
  bool blocked_ = false;  // the socket takes no more: another attempt is useless

  ReadAhead ahead_;
  FrameReceiver receiver_;
  bool begun_ = false;  // a byte has come
};

}  // namespace moolink::transport::tcp
