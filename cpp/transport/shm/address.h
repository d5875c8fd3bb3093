#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <string_view>

#include "base/uid.h"

namespace moolink::transport::shm {

// "shm://<host>/<name>": the abstract Unix socket `name` in the kernel and network namespace `host`
// (32 hexadecimal digits of the host key). "shm:///<name>" is in this one; "shm://", for listening,
// takes a free name.
struct Address {
  std::string host;  // empty: this one
  std::string name;  // empty: to be chosen

  std::string text() const { return "shm://" + host + "/" + name; }
};

bool is_shm_address(std::string_view address);
// Throws Exception{invalid_argument} with the mistake.
Address parse_address(std::string_view address);

struct SocketAddress {
  sockaddr_un storage{};
  socklen_t size = 0;

  explicit SocketAddress(std::string_view abstract_name);
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

}  // namespace moolink::transport::shm
