#pragma once

// How near devices of this machine are to one another, by what the system shows of them.

#include <filesystem>
#include <string>

namespace moolink::transport::verbs {

// Where the system shows its devices; tests have folders of their own.
struct Folders {
  std::filesystem::path sys = "/sys";
  std::filesystem::path proc = "/proc";
};

// Of an RDMA device; negative: not known.
int numa_node_of(const Folders& folders, const std::string& device);
// The place of an RDMA device in the tree of PCI devices; empty: not known.
std::filesystem::path pci_place_of(const Folders& folders, const std::string& device);
// That of the one GPU that this process uses: the machine (or container) has no other, or `visible`
// (CUDA_VISIBLE_DEVICES) is the number of one, in the order of PCI addresses. Empty: not known.
std::filesystem::path only_gpu(const Folders& folders, const std::string& visible);
// How many nodes of the tree above two devices they have in common; 0: none, or not known.
int common_nodes(const std::filesystem::path& one, const std::filesystem::path& other);

}  // namespace moolink::transport::verbs
