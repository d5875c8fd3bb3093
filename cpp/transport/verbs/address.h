#pragma once

#include <string>
#include <string_view>

namespace moolink::transport::verbs {

// "verbs://host:port": the listening address of the tcp connection over which two queue pairs are
// agreed upon. Everything after the scheme is as with tcp.
inline constexpr std::string_view kScheme = "verbs://";

inline bool is_verbs_address(std::string_view address) { return address.starts_with(kScheme); }

inline std::string to_tcp(const std::string& address) {
  return "tcp://" + (is_verbs_address(address) ? address.substr(kScheme.size()) : address);
}

inline std::string from_tcp(const std::string& address) {
  constexpr std::string_view kTcp = "tcp://";
  const bool is_tcp = address.starts_with(kTcp);
  return std::string(kScheme) + (is_tcp ? address.substr(kTcp.size()) : address);
}

}  // namespace moolink::transport::verbs
