#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/verbs/library.h"

namespace moolink::transport::verbs {

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

std::string gid_text(const ibv_gid& gid);

}  // namespace moolink::transport::verbs
