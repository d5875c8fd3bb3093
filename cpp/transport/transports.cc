#include "transport/transports.h"

#include <algorithm>
#include <cctype>

#include "base/environment_variable.h"
#include "base/error.h"
#include "transport/shm/transport.h"
#include "transport/tcp/address.h"
#include "transport/tcp/transport.h"

namespace moolink::transport {

using wire::PathKind;

namespace {

std::unique_ptr<Transport> make(PathKind kind, Environment& environment) {
  switch (kind) {
    case PathKind::tcp:
      return std::make_unique<tcp::TcpTransport>(environment);
    case PathKind::shm:
      return std::make_unique<shm::ShmTransport>(environment);
    case PathKind::verbs:
      return verbs::make_transport(environment);
  }
  throw Exception(ErrorCode::invalid_argument, "no such transport");
}

PathKind kind_named(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  if (name == "tcp" || name == "tcp/ip") return PathKind::tcp;
  if (name == "shm" || name == "shared memory" || name == "ipc") return PathKind::shm;
  if (name == "verbs" || name == "infiniband") {
    const verbs::Availability& found = verbs::availability();
    if (found.usable) return PathKind::verbs;
    throw Exception(ErrorCode::invalid_argument, "transport '" + name +
                                                     "' cannot be used on this machine (" +
                                                     found.reason + "): leave it out");
  }
  throw Exception(ErrorCode::invalid_argument,
                  "transport '" + name +
                      "' is not one of shm (shared memory, ipc), verbs (infiniband) and tcp "
                      "(tcp/ip)");
}

}  // namespace

std::vector<PathKind> kinds_named(const std::vector<std::string>& names) {
  std::vector<PathKind> kinds;
  for (const std::string& name : names) {
    const PathKind kind = kind_named(name);
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  if (kinds.empty())
    throw Exception(ErrorCode::invalid_argument, "transports is empty: name shm, verbs or tcp");
  return kinds;
}

Defaults default_kinds(const verbs::Availability& rdma, bool has_token, std::string_view setting) {
  if (!setting.empty() && setting != "0" && setting != "1") {
    throw Exception(ErrorCode::invalid_argument,
                    "MOOLINK_VERBS is '" + std::string(setting) +
                        "': set 1 to use RDMA, which does not encrypt, or 0 to turn it off");
  }
  const bool is_on = setting == "1" || (setting.empty() && !has_token);
  if (rdma.usable && is_on) return {{PathKind::shm, PathKind::verbs, PathKind::tcp}, {}};
  std::string reason = rdma.reason;
  if (rdma.usable && setting == "0") {
    reason = "available (" + rdma.chosen + "), turned off by MOOLINK_VERBS=0";
  } else if (rdma.usable) {
    reason = "available (" + rdma.chosen +
             "), not used: RDMA is not encrypted, and this peer has a token; enable it at both "
             "peers with MOOLINK_VERBS=1 or transports=[\"shm\", \"verbs\", \"tcp\"]";
  }
  return {{PathKind::shm, PathKind::tcp}, {{PathKind::verbs, std::move(reason)}}};
}

std::vector<std::string> look_up_names(const std::string& address) {
  if (!tcp::is_tcp_address(address)) return {address};
  const tcp::HostPort wanted = tcp::parse_address(address);
  if (wanted.host.empty() || tcp::is_numeric(wanted.host)) return {address};
  std::vector<std::string> addresses;
  for (const tcp::SocketAddress& found : tcp::resolve(wanted)) addresses.push_back(found.text());
  return addresses;
}

Transports make_transports(Environment& environment,
                           const std::optional<std::vector<PathKind>>& named) {
  const verbs::Availability& rdma = verbs::availability();
  Defaults wanted;
  if (named) {
    wanted.kinds = *named;
    const bool has_rdma = std::ranges::count(*named, PathKind::verbs) != 0;
    if (!has_rdma && !rdma.reason.empty()) wanted.lacking[PathKind::verbs] = rdma.reason;
  } else {
    const std::string setting = environment_variable("MOOLINK_VERBS");
    wanted = default_kinds(rdma, !environment.keyring.empty(), setting);
  }
  Transports result{{}, {}, std::move(wanted.lacking), {}};
  for (const PathKind kind : wanted.kinds) {
    try {
      result.made.push_back(make(kind, environment));
      result.kinds.push_back(kind);
    } catch (const Exception& e) {
      if (kind != PathKind::verbs || wanted.kinds.size() == 1) throw;
      result.lacking[kind] = e.error().message;
      result.warning = "RDMA is not used: " + e.error().message;
    }
  }
  return result;
}

}  // namespace moolink::transport
