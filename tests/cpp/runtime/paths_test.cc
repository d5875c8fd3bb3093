#include "runtime/peer/paths.h"

#include "check.h"

namespace moolink::runtime {
namespace paths_test {

using transport::verbs::Availability;
using wire::PathKind;

const std::vector<PathKind> kWithout = {PathKind::shm, PathKind::tcp};
const std::vector<PathKind> kWith = {PathKind::shm, PathKind::verbs, PathKind::tcp};

Availability device() {
  Availability found;
  found.usable = true;
  found.chosen = "rxe0 port 1";
  return found;
}

TEST("a peer with a token goes by RDMA, which does not encrypt, only if it is told to") {
  const EnabledPaths unasked = default_paths(device(), true, "");
  CHECK(unasked.kinds == kWithout);
  CHECK(unasked.no_verbs.starts_with("available (rxe0 port 1), not used: RDMA is not encrypted"));
  CHECK(unasked.no_verbs.find("MOOLINK_VERBS=1") != std::string::npos);
  CHECK(default_paths(device(), true, "1").kinds == kWith);
  CHECK(default_paths(device(), true, "1").no_verbs.empty());
}

TEST("an insecure peer has nothing to lose by RDMA, and can be kept from it") {
  CHECK(default_paths(device(), false, "").kinds == kWith);
  const EnabledPaths off = default_paths(device(), false, "0");
  CHECK(off.kinds == kWithout);
  CHECK_EQ(off.no_verbs, "available (rxe0 port 1), turned off by MOOLINK_VERBS=0");
}

TEST("where there is no RDMA no wish makes any, and its reason stays") {
  Availability nothing;
  nothing.reason = "no RDMA device";
  for (const char* wish : {"", "0", "1"}) {
    for (const bool has_token : {false, true}) {
      const EnabledPaths paths = default_paths(nothing, has_token, wish);
      CHECK(paths.kinds == kWithout);
      CHECK_EQ(paths.no_verbs, "no RDMA device");
    }
  }
}

TEST("a value of MOOLINK_VERBS that means nothing is refused") {
  CHECK_THROWS(default_paths(device(), true, "yes"), ErrorCode::invalid_argument);
}

}  // namespace paths_test
}  // namespace moolink::runtime
