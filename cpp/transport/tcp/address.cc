#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace moolink::transport::tcp {
namespace {

constexpr std::string_view kScheme = "tcp://";

[[noreturn]] void malformed(std::string_view address, const char* what) {
  throw Exception(ErrorCode::invalid_argument, "malformed address '" + std::string(address) +
                                                   "': " + what +
                                                   " (expected tcp://host:port or host:port)");
}

std::uint16_t parse_port(std::string_view address, std::string_view text) {
  std::uint32_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || port > 65535) {
    malformed(address, "the port must be a number from 0 to 65535");
  }
  return static_cast<std::uint16_t>(port);
}

in_addr mapped_v4(const in6_addr& address) {
  in_addr v4{};
  std::memcpy(&v4, address.s6_addr + 12, sizeof v4);
  return v4;
}

}  // namespace

bool is_tcp_address(std::string_view address) {
  return address.starts_with(kScheme) || address.find("://") == std::string_view::npos;
}

HostPort parse_address(std::string_view address) {
  std::string_view rest = address;
  if (rest.starts_with(kScheme)) rest.remove_prefix(kScheme.size());
  if (rest.empty()) malformed(address, "it is empty");
  if (rest.find_first_of("/ \t\n") != std::string_view::npos)
    malformed(address, "stray characters");
  std::string_view host;
  std::string_view port = rest;
  if (rest.front() == '[') {
    const std::size_t end = rest.find(']');
    if (end == std::string_view::npos) malformed(address, "']' is missing");
    host = rest.substr(1, end - 1);
    port = rest.substr(end + 1);
    if (port.empty() || port.front() != ':') malformed(address, "the port is missing");
    port.remove_prefix(1);
    in6_addr parsed{};
    const std::string literal(host.substr(0, host.find('%')));
    if (inet_pton(AF_INET6, literal.c_str(), &parsed) != 1) malformed(address, "no IPv6 address");
  } else if (const std::size_t colon = rest.rfind(':'); colon != std::string_view::npos) {
    host = rest.substr(0, colon);
    port = rest.substr(colon + 1);
    if (host.find(':') != std::string_view::npos) {
      malformed(address, "an IPv6 address is written in brackets");
    }
  } else if (!std::all_of(rest.begin(), rest.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    malformed(address, "the port is missing");
  }
  if (host == "*") host = {};
  return {std::string(host), parse_port(address, port)};
}

std::uint16_t SocketAddress::port() const {
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

bool SocketAddress::is_any() const {
  if (family() == AF_INET6) {
    return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr) != 0;
  }
  return reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr == htonl(INADDR_ANY);
}

bool SocketAddress::is_loopback() const {
  constexpr std::uint32_t kFirstByte = 0xff000000;
  in_addr v4{};
  if (family() == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
    if (!IN6_IS_ADDR_V4MAPPED(&v6)) return IN6_IS_ADDR_LOOPBACK(&v6) != 0;
    v4 = mapped_v4(v6);
  } else {
    v4 = reinterpret_cast<const sockaddr_in&>(storage).sin_addr;
  }
  return (ntohl(v4.s_addr) & kFirstByte) == (INADDR_LOOPBACK & kFirstByte);
}

void SocketAddress::set_port(std::uint16_t port) {
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

std::string SocketAddress::text() const {
  char buffer[INET6_ADDRSTRLEN] = {};
  const std::string port_text = ":" + std::to_string(port());
  if (family() == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage);
    if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
      const in_addr v4 = mapped_v4(v6.sin6_addr);
      inet_ntop(AF_INET, &v4, buffer, sizeof buffer);
      return std::string(kScheme) + buffer + port_text;
    }
    inet_ntop(AF_INET6, &v6.sin6_addr, buffer, sizeof buffer);
    // A link-local address belongs to an interface, which its text must name to be usable.
    char interface[IF_NAMESIZE + 1] = {};
    if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr) && v6.sin6_scope_id != 0 &&
        if_indextoname(v6.sin6_scope_id, interface + 1) != nullptr) {
      interface[0] = '%';
    }
    return std::string(kScheme) + "[" + buffer + interface + "]" + port_text;
  }
  inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, buffer,
            sizeof buffer);
  return std::string(kScheme) + buffer + port_text;
}

std::string source_of(const SocketAddress& address) {
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
  const bool is_v4 = address.family() != AF_INET6 || IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
  if (is_v4) {
    SocketAddress host = address;
    host.set_port(0);
    return host.text();
  }
  constexpr std::size_t kNetworkBytes = 8;
  return {reinterpret_cast<const char*>(&v6.sin6_addr), kNetworkBytes};
}

bool is_same_host(SocketAddress local, SocketAddress remote) {
  local.set_port(0);
  remote.set_port(0);
  return local == remote;
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getsockname(fd, address.get(), &address.size) != 0) address.size = 0;
  return address;
}

SocketAddress remote_address(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (getpeername(fd, address.get(), &address.size) != 0) address.size = 0;
  return address;
}

std::vector<SocketAddress> resolve(const HostPort& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (is_numeric(address.host) ? AI_NUMERICHOST : AI_ADDRCONFIG);
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    throw Exception(ErrorCode::error,
                    "cannot resolve host '" + address.host + "': " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::vector<SocketAddress> result;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    SocketAddress resolved;
    std::memcpy(&resolved.storage, entry->ai_addr, entry->ai_addrlen);
    resolved.size = entry->ai_addrlen;
    result.push_back(resolved);
  }
  return result;
}

bool is_numeric(const std::string& host) {
  in_addr v4{};
  return inet_pton(AF_INET, host.c_str(), &v4) == 1 || host.find(':') != std::string::npos;
}

std::vector<std::string> advertised(std::string_view advertise,
                                    const std::vector<std::string>& bound) {
  std::string_view rest = advertise;
  if (rest.starts_with(kScheme)) rest.remove_prefix(kScheme.size());
  const auto colons = std::count(rest.begin(), rest.end(), ':');
  const bool in_brackets = rest.starts_with('[');
  const bool has_port = in_brackets ? !rest.ends_with(']') : colons == 1;
  std::string complete(rest);
  if (!has_port) {
    if (!in_brackets && colons > 1) complete = "[" + complete + "]";
    complete += ":0";
  }
  HostPort wanted = parse_address(complete);
  if (wanted.host.empty()) malformed(advertise, "others must be told a host");
  if (wanted.port == 0) wanted.port = parse_address(bound.at(0)).port;
  const bool v6 = wanted.host.find(':') != std::string::npos;
  const std::string host = v6 ? "[" + wanted.host + "]" : wanted.host;
  return {std::string(kScheme) + host + ":" + std::to_string(wanted.port)};
}

}  // namespace moolink::transport::tcp
