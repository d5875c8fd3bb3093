#pragma once

// The default paths of a peer.

#include <string>
#include <string_view>
#include <vector>

#include "transport/verbs/availability.h"
#include "wire/path.h"

namespace moolink::runtime {

struct EnabledPaths {
  std::vector<wire::PathKind> kinds;
  std::string no_verbs;  // why RDMA is not among them; empty: it is, or was not requested
};

// RDMA does not encrypt: a peer with a token uses it only if told to. `wish` is the value of the
// environment variable MOOLINK_VERBS: "1", "0" or nothing. Throws Exception{invalid_argument} on
// another value. docs/design/transport-verbs.md, "What is not encrypted".
EnabledPaths default_paths(const transport::verbs::Availability& found, bool has_token,
                           std::string_view wish);

}  // namespace moolink::runtime
