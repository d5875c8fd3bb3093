#pragma once

// The device, port and GID of this machine for RDMA.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/verbs/availability.h"
#include "transport/verbs/library.h"
#include "transport/verbs/nearness.h"

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

// One end of RDMA connections.
struct Port {
  std::string device;
  std::uint8_t number = 1;
  bool infiniband = false;  // addressed by LID; else RoCE v2, by GID
  std::uint16_t lid = 0;
  int gid_index = 0;
  ibv_gid gid{};
  ibv_mtu mtu = IBV_MTU_1024;
  double gigabits = 0;  // a second
  int numa_node = -1;
  int gpu_nodes = 0;            // of the PCI tree shared with the GPU that this process uses
  std::size_t queue_pairs = 1;  // of each connection
  bool gpudirect = false;

  std::string text() const;
};

struct Choice {
  std::optional<Port> port;
  std::string reason;              // why none
  std::vector<std::string> ports;  // all that were examined, each with its fault
};

Choice choose(const Library& library, const Preferences& preferences);
// Whether there is any device at all; asks the system, not the library.
bool has_devices(const Folders& folders);
std::string gid_text(const ibv_gid& gid);

// The complete look: the result of availability().
Availability look(const Preferences& preferences, const LoadedLibrary& (*load)());

}  // namespace moolink::transport::verbs
