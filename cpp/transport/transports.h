#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/availability.h"
#include "wire/path.h"

namespace moolink::transport {

// The kinds with these names, moolib's included. Throws Exception{invalid_argument} if there is
// none, or a name is unknown or of a transport that cannot be used on this machine.
std::vector<wire::PathKind> kinds_named(const std::vector<std::string>& names);

// The kinds of path that a peer has by default.
struct Defaults {
  std::vector<wire::PathKind> kinds;
  wire::Lacking lacking;
};
// RDMA does not encrypt: a peer with a token uses it only if told to. `setting` is the value of the
// environment variable MOOLINK_VERBS: "1", "0" or nothing. Throws Exception{invalid_argument} on
// another value. See docs/design/transport-verbs.md, "Bytes that are not encrypted".
Defaults default_kinds(const verbs::Availability& rdma, bool has_token, std::string_view setting);

// The addresses to listen at, without names: what a name stands for is looked up, which may take
// many seconds. Throws Exception with the reason.
std::vector<std::string> look_up_names(const std::string& address);

struct Transports {
  std::vector<std::unique_ptr<Transport>> made;
  std::vector<wire::PathKind> kinds;  // of `made`
  wire::Lacking lacking;
  std::string warning;  // why RDMA is not used although it was chosen; empty: none
};
// named: the kinds that the user chose; none: default_kinds(). Throws Exception{error} if a
// transport cannot be made; RDMA is left out if there is another transport.
Transports make_transports(Environment& environment,
                           const std::optional<std::vector<wire::PathKind>>& named);

}  // namespace moolink::transport
