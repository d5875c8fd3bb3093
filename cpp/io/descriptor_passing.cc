#include "io/descriptor_passing.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace moolink::io {
namespace {

struct ControlBuffer {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(kMaxPassedDescriptors * sizeof(int))> bytes;
};

// Takes ownership of the descriptors that the kernel installed, before anything can throw.
std::vector<Descriptor> take_descriptors(msghdr& header) {
  std::vector<Descriptor> descriptors;
  descriptors.reserve(kMaxPassedDescriptors);
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(c) + i * sizeof(int), sizeof descriptor);
      descriptors.emplace_back(descriptor);
    }
  }
  return descriptors;
}

}  // namespace

bool send_message(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  if (bytes.empty() || bytes.size() > kMaxPassedBytes ||
      descriptors.size() > kMaxPassedDescriptors) {
    throw Exception(ErrorCode::invalid_argument,
                    "a message of " + std::to_string(bytes.size()) + " bytes and " +
                        std::to_string(descriptors.size()) + " descriptors cannot be passed");
  }
  iovec vector{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  ControlBuffer control{};
  if (!descriptors.empty()) {
    header.msg_control = control.bytes.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(c), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return true;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
  throw Exception(ErrorCode::peer_lost,
                  std::string("cannot pass descriptors to the peer: ") + std::strerror(errno));
}

Received receive_message(int socket, DescriptorMessage& message) {
  message.bytes.resize(kMaxPassedBytes);
  message.descriptors.clear();
  iovec vector{message.bytes.data(), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  ControlBuffer control{};
  header.msg_control = control.bytes.data();
  header.msg_controllen = control.bytes.size();
  ssize_t received = 0;
  do {
    received = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0) {
    message.bytes.clear();
    return errno == EAGAIN || errno == EWOULDBLOCK ? Received::nothing : Received::end;
  }
  message.descriptors = take_descriptors(header);
  message.bytes.resize(static_cast<std::size_t>(received));
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    throw Exception(ErrorCode::wire, "a peer passed a message that is too large");
  }
  // The system reports both causes alike.
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    throw Exception(ErrorCode::wire,
                    "not all descriptors that a peer passed could be taken: there were more than " +
                        std::to_string(kMaxPassedDescriptors) +
                        ", or this process may open no more files (see ulimit -n)");
  }
  return received == 0 ? Received::end : Received::message;
}

}  // namespace moolink::io
