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

// Why no connection came about.
class HandshakeFailure : public Exception {
 public:
  explicit HandshakeFailure(Error error) : Exception(std::move(error)) {}
  HandshakeFailure(ErrorCode code, const std::string& message) : Exception(code, message) {}

  std::string answer;                    // to be said in plain, in place of TLS's alert
  std::optional<crypto::Key> key_there;  // held here too: to dial again with
};

// The bytes of one connection, under its frames, on their way through its socket: as they are, or
// in TLS. The socket is its connection's. What fails throws Exception.
class ByteStream {
 public:
  struct Sent {
    std::size_t bytes = 0;  // taken, from the front
    bool full = false;      // the socket takes no more now
  };
  struct Received {
    std::size_t bytes = 0;
    bool drained = false;  // nothing more is here; the socket becomes ready when there is
    bool ended = false;    // the peer has closed
  };

  virtual ~ByteStream() = default;

  // Empty: what is sent can be read by others.
  virtual std::string_view cipher() const { return {}; }
  virtual wire::ChannelBinding binding() const { return {}; }
  // Goes on with what comes before the first byte; true once both sides are sure of each other.
  // Throws HandshakeFailure.
  virtual bool shake_hands() { return true; }
  // Takes bytes and sends them, as many as the socket does.
  virtual Sent send(std::span<const iovec> pieces) = 0;
  // Bytes that were taken and have not left yet.
  virtual bool unsent() const { return false; }
  // Fills the pieces in order, with what was read from the socket before, too. `allowance`: bytes
  // after which the socket is not read again.
  virtual Received receive(std::span<const iovec> pieces, std::size_t allowance) = 0;
  // More was read from the socket than has been received.
  virtual bool holds_bytes() const { return false; }
  // Tells the peer that no more comes; false: not yet, when the socket takes more.
  virtual bool shut_down() = 0;
};

// The socket as it is.
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
// Throws Exception{peer_lost} with what the system says.
[[noreturn]] void socket_failed(int error);

}  // namespace moolink::transport::tcp
