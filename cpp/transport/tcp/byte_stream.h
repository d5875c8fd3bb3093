#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "crypto/keyring.h"
#include "wire/path.h"

namespace moolink::transport::tcp {

// Why a connection could not be made.
class HandshakeFailure : public Exception {
 public:
  explicit HandshakeFailure(Error error) : Exception(std::move(error)) {}
  HandshakeFailure(ErrorCode code, const std::string& message) : Exception(code, message) {}

  std::string answer;                    // to send in plain, in place of TLS's alert
  std::optional<crypto::Key> key_there;  // held here too: to dial again with
};

// The bytes of one connection, below its frames, through its socket: plain, or in TLS. The
// connection owns the socket. Failures throw Exception.
class ByteStream {
 public:
  struct Sent {
    std::size_t bytes = 0;  // taken, from the front
    bool full = false;      // the stream takes no more now
  };
  struct Received {
    std::size_t bytes = 0;
    bool drained = false;  // no more bytes now: they come when the socket becomes ready, or with
                           // turned()
    bool ended = false;    // the peer has closed
  };

  virtual ~ByteStream() = default;

  // Empty: others can read what is sent.
  virtual std::string_view cipher() const { return {}; }
  virtual wire::ChannelBinding binding() const { return {}; }
  // Continues the handshake before the first byte; true once both sides have authenticated each
  // other. Throws HandshakeFailure.
  virtual bool shake_hands() { return true; }
  // Takes bytes and sends as many as the socket accepts.
  virtual Sent send(std::span<const iovec> pieces) = 0;
  // Bytes that were taken and not sent yet.
  virtual bool unsent() const { return false; }
  // Fills the pieces in order, also with bytes read from the socket before. `allowance`: bytes
  // after which the socket is not read again.
  virtual Received receive(std::span<const iovec> pieces, std::size_t allowance) = 0;
  // More was read from the socket than has been received.
  virtual bool holds_bytes() const { return false; }
  // Another thread works on the stream's bytes: send() takes none until turned(), and receive()
  // gives only those that are ready.
  virtual bool busy() const { return false; }
  // The other thread has finished.
  virtual void turned() {}
  // Whether receive() would read the socket.
  virtual bool takes_input() const { return true; }
  // Tells the peer that no more comes; false: not yet, retry when the socket takes more.
  virtual bool shut_down() = 0;
};

// The plain socket.
class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(int socket) : socket_(socket) {}

  Sent send(std::span<const iovec> pieces) override;
  Received receive(std::span<const iovec> pieces, std::size_t allowance) override;
  bool shut_down() override;

 private:
  int socket_;
};

// sendmsg() and recvmsg() that do not block, repeated after a signal. -1 with errno.
ssize_t send_pieces(int socket, std::span<const iovec> pieces);
ssize_t receive_pieces(int socket, std::span<const iovec> pieces);
bool would_block(int error);
// Throws Exception{peer_lost} with the system's error.
[[noreturn]] void socket_failed(int error);

}  // namespace moolink::transport::tcp
