#include "transport/verbs/nearness.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <vector>

namespace moolink::transport::verbs {
namespace {

namespace fs = std::filesystem;

// Follows links: "…/devices/pci0000:16/0000:16:01.0/0000:17:00.0".
fs::path place(const fs::path& link) {
  std::error_code error;
  fs::path found = fs::canonical(link, error);
  return error ? fs::path() : found;
}

}  // namespace

int numa_node_of(const Folders& folders, const std::string& device) {
  std::ifstream stream(folders.sys / "class/infiniband" / device / "device/numa_node");
  int node = -1;
  return stream >> node ? node : -1;
}

fs::path pci_place_of(const Folders& folders, const std::string& device) {
  return place(folders.sys / "class/infiniband" / device / "device");
}

fs::path only_gpu(const Folders& folders, const std::string& visible) {
  // The driver's folder lists exactly those that a container may use.
  std::vector<std::string> addresses;
  std::error_code error;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(folders.proc / "driver/nvidia/gpus", error)) {
    addresses.push_back(entry.path().filename());
  }
  std::sort(addresses.begin(), addresses.end());
  std::size_t number = 0;
  if (visible.empty()) {
    if (addresses.size() != 1) return {};
  } else {
    const char* end = visible.data() + visible.size();
    const auto [rest, failure] = std::from_chars(visible.data(), end, number);
    if (failure != std::errc() || rest != end || number >= addresses.size()) return {};
  }
  return place(folders.sys / "bus/pci/devices" / addresses[number]);
}

int common_nodes(const fs::path& one, const fs::path& other) {
  int common = 0;
  bool in_tree = false;
  for (auto a = one.begin(), b = other.begin(); a != one.end() && b != other.end() && *a == *b;
       ++a, ++b) {
    in_tree = in_tree || a->string().starts_with("pci");
    common += in_tree ? 1 : 0;
  }
  return common;
}

}  // namespace moolink::transport::verbs
