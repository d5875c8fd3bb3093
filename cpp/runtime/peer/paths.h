#pragma once

// The default paths of a peer.

#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
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
inline EnabledPaths default_paths(const transport::verbs::Availability& found, bool has_token,
                                  std::string_view wish) {
  using wire::PathKind;
  if (!wish.empty() && wish != "0" && wish != "1") {
    throw Exception(ErrorCode::invalid_argument,
                    "MOOLINK_VERBS is '" + std::string(wish) +
                        "': 1 lets peers use RDMA, which does not encrypt, and 0 does not");
  }
  EnabledPaths paths{{PathKind::shm, PathKind::tcp}, {}};
  if (!found.usable) {
    paths.no_verbs = found.reason;
  } else if (wish == "0") {
    paths.no_verbs = "available (" + found.chosen + "), turned off by MOOLINK_VERBS=0";
  } else if (wish.empty() && has_token) {
    paths.no_verbs = "available (" + found.chosen +
                     "), not used: RDMA is not encrypted, and this peer has a token; enable it "
                     "at both peers with MOOLINK_VERBS=1 or transports=[\"shm\", \"verbs\", "
                     "\"tcp\"]";
  } else {
    paths.kinds = {PathKind::shm, PathKind::verbs, PathKind::tcp};
  }
  return paths;
}

}  // namespace moolink::runtime
