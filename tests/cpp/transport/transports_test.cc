#include "transport/transports.h"

#include "check.h"

namespace moolink::transport {
namespace transports_test {

using verbs::Availability;
using wire::PathKind;

const std::vector<PathKind> kWithout = {PathKind::shm, PathKind::tcp};
const std::vector<PathKind> kWith = {PathKind::shm, PathKind::verbs, PathKind::tcp};

Availability device() {
  Availability found;
  found.usable = true;
  found.chosen = "rxe0 port 1";
  return found;
}

TEST("a name to listen at is looked up before; what is no name is left alone") {
  for (const std::string& address : look_up_names("localhost:4431")) {
    CHECK(address == "tcp://127.0.0.1:4431" || address == "tcp://[::1]:4431");
  }
  CHECK(!look_up_names("localhost:0").empty());
  for (const char* address : {"tcp://127.0.0.1:0", "[::1]:7", ":0", "shm://", "verbs://a:1"}) {
    CHECK(look_up_names(address) == std::vector<std::string>{address});
  }
  CHECK_THROWS(look_up_names("localhost:99999"), ErrorCode::invalid_argument);
}

TEST("a peer with a token uses RDMA, which does not encrypt, only with MOOLINK_VERBS=1") {
  const Defaults unasked = default_kinds(device(), true, "");
  CHECK(unasked.kinds == kWithout);
  CHECK(unasked.lacking.at(PathKind::verbs)
            .starts_with("available (rxe0 port 1), not used: RDMA is not encrypted"));
  CHECK(unasked.lacking.at(PathKind::verbs).find("MOOLINK_VERBS=1") != std::string::npos);
  CHECK(default_kinds(device(), true, "1").kinds == kWith);
  CHECK(default_kinds(device(), true, "1").lacking.empty());
}

TEST("an insecure peer uses RDMA unless MOOLINK_VERBS=0") {
  CHECK(default_kinds(device(), false, "").kinds == kWith);
  const Defaults off = default_kinds(device(), false, "0");
  CHECK(off.kinds == kWithout);
  CHECK_EQ(off.lacking.at(PathKind::verbs),
           "available (rxe0 port 1), turned off by MOOLINK_VERBS=0");
}

TEST("without an RDMA device MOOLINK_VERBS has no effect, and the reason is reported") {
  Availability nothing;
  nothing.reason = "no RDMA device";
  for (const char* setting : {"", "0", "1"}) {
    for (const bool has_token : {false, true}) {
      const Defaults paths = default_kinds(nothing, has_token, setting);
      CHECK(paths.kinds == kWithout);
      CHECK_EQ(paths.lacking.at(PathKind::verbs), "no RDMA device");
    }
  }
}

TEST("a value of MOOLINK_VERBS other than 0 and 1 is refused") {
  CHECK_THROWS(default_kinds(device(), true, "yes"), ErrorCode::invalid_argument);
}

}  // namespace transports_test
}  // namespace moolink::transport
