#include "transport/tcp/interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace moolink::transport::tcp {
namespace {

constexpr int kMappedBits = 96;  // before the v4 address in a v6 one

using Bytes = std::array<std::uint8_t, 16>;

Bytes mapped(const in_addr& v4) {
  Bytes bytes{};
  bytes[10] = bytes[11] = 0xff;
  std::memcpy(bytes.data() + 12, &v4, sizeof v4);
  return bytes;
}

Bytes bytes_of(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    return mapped(reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr);
  }
  Bytes bytes{};
  std::memcpy(bytes.data(), &reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr,
              bytes.size());
  return bytes;
}

bool same_network(const Bytes& a, const Bytes& b, int bits) {
  const auto whole = static_cast<std::size_t>(bits / 8);
  if (!std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(whole), b.begin())) {
    return false;
  }
  if (bits % 8 == 0) return true;
  const auto mask = static_cast<std::uint8_t>(0xff00 >> (bits % 8));
  return (a[whole] & mask) == (b[whole] & mask);
}

// False for addresses that cannot be listened on or announced.
bool usable(const ifaddrs& entry, SocketAddress& address) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return false;
  if (entry.ifa_addr->sa_family == AF_INET) {
    address.size = sizeof(sockaddr_in);
  } else if (entry.ifa_addr->sa_family == AF_INET6) {
    const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr);
    if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) return false;
    address.size = sizeof(sockaddr_in6);
  } else {
    return false;
  }
  std::memcpy(&address.storage, entry.ifa_addr, address.size);
  return true;
}

}  // namespace

InterfaceChoice::InterfaceChoice(std::string_view text) : text_(text) {
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    std::string_view entry = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    while (entry.starts_with(' ')) entry.remove_prefix(1);
    while (entry.ends_with(' ')) entry.remove_suffix(1);
    if (entry.empty()) continue;
    if (const std::size_t slash = entry.find('/'); slash != std::string_view::npos) {
      ranges_.push_back(parse_range(entry, slash));
    } else {
      names_.emplace_back(entry);
    }
  }
}

InterfaceChoice::Range InterfaceChoice::parse_range(std::string_view entry, std::size_t slash) {
  Range range;
  const std::string host(entry.substr(0, slash));
  const std::string_view length = entry.substr(slash + 1);
  in_addr v4{};
  const bool is_v4 = inet_pton(AF_INET, host.c_str(), &v4) == 1;
  const bool is_v6 = !is_v4 && inet_pton(AF_INET6, host.c_str(), range.network.data()) == 1;
  const auto [end, error] =
      std::from_chars(length.data(), length.data() + length.size(), range.bits);
  const int most = is_v4 ? 32 : 128;
  if ((!is_v4 && !is_v6) || length.empty() || error != std::errc() ||
      end != length.data() + length.size() || range.bits < 0 || range.bits > most) {
    throw Exception(ErrorCode::invalid_argument,
                    "MOOLINK_INTERFACE: '" + std::string(entry) +
                        "' is no range of addresses such as 10.0.0.0/8 or fd00::/8");
  }
  if (is_v4) {
    range.network = mapped(v4);
    range.bits += kMappedBits;
  }
  return range;
}

bool InterfaceChoice::allows(std::string_view interface, const SocketAddress& address) const {
  if (all() || std::find(names_.begin(), names_.end(), interface) != names_.end()) return true;
  const Bytes bytes = bytes_of(address);
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range& range) {
    return same_network(bytes, range.network, range.bits);
  });
}

std::vector<SocketAddress> interface_addresses(const InterfaceChoice& choice) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<SocketAddress> result;
  std::vector<SocketAddress> others;
  std::string present;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    SocketAddress address;
    if (!usable(*entry, address)) continue;
    const std::string text = address.text();
    present += (present.empty() ? "" : ", ") + std::string(entry->ifa_name) + " " +
               text.substr(std::strlen("tcp://"), text.rfind(':') - std::strlen("tcp://"));
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0) {
      result.push_back(address);
    } else if (choice.allows(entry->ifa_name, address)) {
      others.push_back(address);
    }
  }
  const bool asks_for_loopback_only =
      std::any_of(result.begin(), result.end(),
                  [&](const SocketAddress& address) { return choice.allows("lo", address); });
  if (!choice.all() && others.empty() && !asks_for_loopback_only) {
    throw Exception(ErrorCode::error, "MOOLINK_INTERFACE is '" + choice.text() +
                                          "', but this host has no such address; it has " +
                                          present);
  }
  result.insert(result.end(), others.begin(), others.end());
  return result;
}

}  // namespace moolink::transport::tcp
