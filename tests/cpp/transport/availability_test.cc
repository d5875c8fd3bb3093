// What every build says of RDMA, with libibverbs' header or without.

#include "transport/verbs/availability.h"

#include "check.h"

namespace moolink::transport::verbs {
namespace availability_test {

TEST("verbs: RDMA is usable, or there is a reason why not") {
  const Availability& found = availability();
  CHECK_EQ(found.usable, found.reason.empty());
  CHECK_EQ(found.usable, !found.chosen.empty() && found.reason.empty());
  CHECK_EQ(&found, &availability());
}

}  // namespace availability_test
}  // namespace moolink::transport::verbs
