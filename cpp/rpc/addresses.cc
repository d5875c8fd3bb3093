#include "rpc/addresses.h"

#include <algorithm>

namespace moolink::rpc {

namespace {

bool is_shared_memory(const std::string& address) { return address.starts_with("shm://"); }

bool is_loopback(const std::string& address) {
  const std::string_view host = host_of(address);
  return !is_shared_memory(address) &&
         (host.starts_with("127.") || host == "[::1]" || host == "localhost");
}

}  // namespace

bool reachable(const std::string& address, bool same_host) {
  return same_host || !(is_shared_memory(address) || is_loopback(address));
}

bool is_of(const std::string& address, wire::PathKind kind) {
  return address.starts_with(std::string(wire::kPathNames[kind]) + "://");
}

std::string_view host_of(std::string_view address) {
  constexpr std::string_view kAfterScheme = "://";
  const std::size_t begin = address.find(kAfterScheme);
  const std::size_t end = address.rfind(':');
  if (begin == std::string_view::npos || end <= begin) return {};
  return address.substr(begin + kAfterScheme.size(), end - begin - kAfterScheme.size());
}

void sort_by_preference(std::vector<std::string>& addresses) {
  std::ranges::stable_sort(addresses, [](const std::string& a, const std::string& b) {
    const auto rank = [](const std::string& address) {
      if (is_shared_memory(address)) return 0;
      // A dial that does not reach the host fails after seconds only.
      if (is_of(address, wire::kBestBetweenHosts)) return 3;
      return is_loopback(address) ? 1 : 2;
    };
    return rank(a) < rank(b);
  });
}

}  // namespace moolink::rpc
