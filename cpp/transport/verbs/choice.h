#pragma once

// The device, port and GID of this machine for RDMA.

#include <optional>
#include <string>
#include <vector>

#include "transport/verbs/availability.h"
#include "transport/verbs/library.h"
#include "transport/verbs/nearness.h"
#include "transport/verbs/port.h"

namespace moolink::transport::verbs {

// The user's requests; from MOOLINK_VERBS_DEVICE, _PORT, _GID_INDEX, _QUEUE_PAIRS, _GPUDIRECT.
struct Preferences {
  std::string device;        // empty: the best one; "none": no RDMA
  int port = 0;              // 0: the best one
  int gid_index = -1;        // negative: the best one
  int queue_pairs = 2;       // of each connection: one for frames, the rest for large parts
  bool gpudirect = false;    // RDMA reads CUDA devices
  int near_node = -1;        // a NUMA node; negative: not known
  std::string visible_gpus;  // CUDA_VISIBLE_DEVICES
  Folders folders;

  // Throws Exception{invalid_argument} that names the variable it cannot read.
  static Preferences from_environment();
};

struct Choice {
  std::optional<Port> port;
  std::string reason;              // why none
  std::vector<std::string> ports;  // all that were examined, each with its fault
};

Choice choose(const Library& library, const Preferences& preferences);
// Whether there is any device at all; asks the system, not the library.
bool has_devices(const Folders& folders);

// The complete look: the result of availability().
Availability look(const Preferences& preferences, const LoadedLibrary& (*load)());

}  // namespace moolink::transport::verbs
