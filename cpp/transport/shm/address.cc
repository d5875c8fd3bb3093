#include "transport/shm/address.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace moolink::transport::shm {
namespace {

constexpr std::string_view kScheme = "shm://";
constexpr std::size_t kLongestName = sizeof(sockaddr_un::sun_path) - 1;

[[noreturn]] void throw_malformed(std::string_view address, const std::string& why) {
  throw Exception(ErrorCode::invalid_argument, "'" + std::string(address) +
                                                   "' is no address of shared memory "
                                                   "(shm://<host>/<name>): " +
                                                   why);
}

}  // namespace

bool is_shm_address(std::string_view address) { return address.substr(0, 4) == "shm:"; }

Address parse_address(std::string_view address) {
  if (address.substr(0, kScheme.size()) != kScheme) {
    throw_malformed(address, "it does not begin with shm://");
  }
  const std::string_view rest = address.substr(kScheme.size());
  if (rest.empty()) return {};
  const std::size_t slash = rest.find('/');
  if (slash == std::string_view::npos) throw_malformed(address, "it has no /<name>");
  const Address parsed{std::string(rest.substr(0, slash)), std::string(rest.substr(slash + 1))};
  const auto visible = [](char c) { return c > ' ' && c < '\x7f' && c != '/'; };
  if (!std::all_of(parsed.name.begin(), parsed.name.end(), visible)) {
    throw_malformed(address, "its name has characters that names cannot have");
  }
  if (parsed.name.size() > kLongestName) {
    throw_malformed(address, "its name is longer than " + std::to_string(kLongestName) + " bytes");
  }
  return parsed;
}

SocketAddress::SocketAddress(std::string_view abstract_name) {
  storage.sun_family = AF_UNIX;
  // The leading zero byte makes the name abstract: no file, gone with its last socket.
  std::memcpy(storage.sun_path + 1, abstract_name.data(),
              std::min(abstract_name.size(), kLongestName));
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + abstract_name.size());
}

}  // namespace moolink::transport::shm
