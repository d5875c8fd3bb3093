#include "transport/tcp/byte_stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace moolink::transport::tcp {
namespace {

msghdr message_of(std::span<const iovec> pieces) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  return message;
}

std::size_t total(std::span<const iovec> pieces) {
  std::size_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

}  // namespace

ssize_t send_pieces(int socket, std::span<const iovec> pieces) {
  const msghdr message = message_of(pieces);
  ssize_t count = 0;
  do {
    count = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  return count;
}

ssize_t receive_pieces(int socket, std::span<const iovec> pieces) {
  msghdr message = message_of(pieces);
  ssize_t count = 0;
  do {
    count = recvmsg(socket, &message, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  return count;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

void socket_failed(int error) { throw Exception(ErrorCode::peer_lost, std::strerror(error)); }

ByteStream::Sent PlainStream::send(std::span<const iovec> pieces) {
  const ssize_t count = send_pieces(socket_, pieces);
  if (count < 0) {
    if (would_block(errno)) return {0, true};
    socket_failed(errno);
  }
  const auto sent = static_cast<std::size_t>(count);
  return {sent, sent < total(pieces)};
}

ByteStream::Received PlainStream::receive(std::span<const iovec> pieces,
                                          std::size_t /*allowance*/) {
  const ssize_t count = receive_pieces(socket_, pieces);
  if (count < 0) {
    if (would_block(errno)) return {0, true, false};
    socket_failed(errno);
  }
  const auto received = static_cast<std::size_t>(count);
  return {received, received < total(pieces), count == 0};
}

bool PlainStream::shut_down() {
  ::shutdown(socket_, SHUT_WR);
  return true;
}

}  // namespace moolink::transport::tcp
