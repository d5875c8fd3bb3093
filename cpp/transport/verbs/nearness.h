#pragma once

// How near devices of this machine are to one another, from the system's files.

#include <filesystem>
#include <string>

namespace moolink::transport::verbs {

// The system's device folders; tests use their own.
struct Folders {
  std::filesystem::path sys = "/sys";
  std::filesystem::path proc = "/proc";
};

// Of an RDMA device; negative: unknown.
int numa_node_of(const Folders& folders, const std::string& device);
// The place of an RDMA device in the tree of PCI devices; empty: unknown.
std::filesystem::path pci_place_of(const Folders& folders, const std::string& device);
// That of the only GPU of this process: the machine (or container) has no other, or `visible`
// (CUDA_VISIBLE_DEVICES) is the number of one, in the order of PCI addresses. Empty: unknown.
std::filesystem::path only_gpu(const Folders& folders, const std::string& visible);
// How many ancestors in the tree two devices share; 0: none, or unknown.
int common_nodes(const std::filesystem::path& one, const std::filesystem::path& other);

}  // namespace moolink::transport::verbs
