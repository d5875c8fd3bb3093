#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "check.h"
#include "conformance.h"
#include "crypto/keyring.h"
#include "transport/tcp/address.h"
#include "transport/tcp/transport.h"

namespace moolink::transport {

// tcp between peers that hold these keys; with none of them they are insecure.
inline conformance::Subject with_keys(std::vector<crypto::Key> keys, bool tls_thread = false) {
  return {tls_thread ? "tls in turns" : "tls",
          [keys = std::move(keys), tls_thread](Environment& environment) {
            environment.keyring = crypto::Keyring(keys);
            environment.tls_thread = tls_thread;
            return std::make_unique<tcp::TcpTransport>(environment);
          },
          "tcp://127.0.0.1:0", "tcp://127.0.0.1:port"};
}

// A client that is no moolink peer.
inline Descriptor plain_socket(const std::string& address) {
  const auto target = tcp::resolve(tcp::parse_address(address)).at(0);
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_EQ(::connect(socket.get(), target.get(), target.size), 0);
  return socket;
}

}  // namespace moolink::transport
