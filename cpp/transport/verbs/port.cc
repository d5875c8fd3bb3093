#include "transport/verbs/port.h"

#include <arpa/inet.h>

#include <array>

namespace moolink::transport::verbs {

std::string gid_text(const ibv_gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  return inet_ntop(AF_INET6, gid.raw, text.data(), text.size()) == nullptr ? "?" : text.data();
}

std::string Port::text() const {
  std::string text = device + " port " + std::to_string(number) + ", ";
  text += infiniband ? "InfiniBand, LID " + std::to_string(lid)
                     : "RoCE v2, GID " + std::to_string(gid_index) + " (" + gid_text(gid) + ")";
  if (gigabits > 0) text += ", " + std::to_string(static_cast<int>(gigabits)) + " Gbit/s";
  if (numa_node >= 0) text += ", NUMA node " + std::to_string(numa_node);
  if (gpu_nodes > 1) text += ", near the GPU";
  if (gpudirect) text += ", GPUDirect";
  return text;
}

}  // namespace moolink::transport::verbs
