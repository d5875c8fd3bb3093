#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moolink::transport::tcp {

// "tcp://host:port" and its common short forms: host:port, [v6]:port, :port, *:port, port.
struct HostPort {
  std::string host;  // empty: every interface
  std::uint16_t port = 0;
};

bool is_tcp_address(std::string_view address);
// Throws Exception{invalid_argument} with the mistake.
HostPort parse_address(std::string_view address);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  std::uint16_t port() const;
  bool is_any() const;  // of every interface: 0.0.0.0 or [::]
  bool is_loopback() const;
  void set_port(std::uint16_t port);
  std::string text() const;  // "tcp://127.0.0.1:4431"; a v4 address mapped into v6 is shown as v4
  bool operator==(const SocketAddress& other) const { return text() == other.text(); }
};

// The addresses of one owner, as far as an address tells: an IPv4 address, or the 2^64 of an IPv6
// network.
std::string source_of(const SocketAddress& address);
// Whether a connection between these stays on one host.
bool is_same_host(SocketAddress local, SocketAddress remote);

SocketAddress local_address(int fd);
SocketAddress remote_address(int fd);

// Blocks if `host` is a name. Throws Exception{error} that names the host.
std::vector<SocketAddress> resolve(const HostPort& address);
// True if host is numeric, so that resolve() does not block.
bool is_numeric(const std::string& host);

// The addresses to announce instead of the bound ones: "host" or "host:port"; without a port, or
// with port 0, the listener's. Throws Exception{invalid_argument}.
std::vector<std::string> advertised(std::string_view advertise,
                                    const std::vector<std::string>& bound);

}  // namespace moolink::transport::tcp
