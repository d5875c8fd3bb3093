#pragma once

// Whether this process can use RDMA, and why not; compiled on every machine, with verbs or without.

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace moolink::transport::verbs {

struct Availability {
  bool usable = false;
  std::string library;               // the file of the loaded libibverbs; empty: none was loaded
  std::string chosen;                // "rxe0 port 1, RoCE v2, GID 1 (::ffff:10.77.0.1)"
  std::string reason;                // why RDMA is not used, and what to do; empty if it is
  std::vector<std::string> devices;  // one line for each port of each device, for people
};

// Looks once, at the first call. Without a device in /sys/class/infiniband nothing is loaded.
const Availability& availability();

// Opens the device of availability(). Throws Exception{error} with the reason if there is none.
std::unique_ptr<Transport> make_transport(Environment& environment);

}  // namespace moolink::transport::verbs
