// Compiled in place of the other files of this folder if libibverbs' header was not found.

#include "transport/verbs/availability.h"

namespace moolink::transport::verbs {

const Availability& availability() {
  static const Availability found = [] {
    Availability nothing;
    nothing.reason =
        "no RDMA in this build of moolink: infiniband/verbs.h was not found when it was built "
        "(Debian: libibverbs-dev)";
    return nothing;
  }();
  return found;
}

std::unique_ptr<Transport> make_transport(Environment&) {
  throw Exception(ErrorCode::error, availability().reason);
}

}  // namespace moolink::transport::verbs
