#include "fake_verbs.h"

#include <arpa/inet.h>
#include <stdlib.h>

#include <cerrno>
#include <fstream>
#include <memory>

namespace moolink::transport::verbs {
namespace {

FakeVerbs* fake = nullptr;

// What the library hands out stands for the number of a device.
struct Handle {
  ibv_device device{};
  ibv_context context{};
  ibv_pd domain{};
  ibv_mr region{};
};
std::vector<std::unique_ptr<Handle>> handles;

const FakeDevice& of(const ibv_context* context) {
  for (std::size_t i = 0; i < handles.size(); ++i) {
    if (&handles[i]->context == context) return fake->devices().at(i);
  }
  std::abort();
}

int failed(int error) {
  errno = error;
  return error;
}

ibv_device** get_device_list(int* count) {
  fake->listed = true;
  if (fake->list_error != 0) {
    errno = fake->list_error;
    return nullptr;
  }
  auto** list = new ibv_device* [handles.size() + 1] {};
  for (std::size_t i = 0; i < handles.size(); ++i) list[i] = &handles[i]->device;
  *count = static_cast<int>(handles.size());
  ++fake->open;
  return list;
}

void free_device_list(ibv_device** list) {
  --fake->open;
  delete[] list;
}

const char* get_device_name(ibv_device* device) { return device->name; }

ibv_context* open_device(ibv_device* device) {
  for (std::size_t i = 0; i < handles.size(); ++i) {
    if (&handles[i]->device != device) continue;
    errno = fake->devices()[i].open_error;
    if (errno != 0) return nullptr;
    ++fake->open;
    return &handles[i]->context;
  }
  std::abort();
}

int close_device(ibv_context*) { return --fake->open, 0; }

int query_device(ibv_context* context, ibv_device_attr* attributes) {
  *attributes = {};
  attributes->phys_port_cnt = static_cast<std::uint8_t>(of(context).ports.size());
  return 0;
}

int query_port(ibv_context* context, std::uint8_t number, ibv_port_attr* attributes) {
  const FakePort& port = of(context).ports.at(number - 1);
  *attributes = {};
  attributes->state = port.state;
  attributes->link_layer = port.infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
  attributes->lid = port.lid;
  attributes->active_mtu = IBV_MTU_4096;
  attributes->active_speed = port.speed;
  attributes->active_width = port.width;
  attributes->gid_tbl_len = static_cast<int>(port.gids.size());
  return 0;
}

int query_gid(ibv_context* context, std::uint8_t number, int index, ibv_gid* gid) {
  const FakePort& port = of(context).ports.at(number - 1);
  if (index < 0 || static_cast<std::size_t>(index) >= port.gids.size()) return failed(EINVAL);
  *gid = port.gids[static_cast<std::size_t>(index)].gid;
  return 0;
}

ibv_pd* alloc_pd(ibv_context* context) {
  for (const auto& handle : handles) {
    if (&handle->context != context) continue;
    ++fake->open;
    return &handle->domain;
  }
  std::abort();
}

int dealloc_pd(ibv_pd*) { return --fake->open, 0; }

ibv_mr* reg_mr(ibv_pd* domain, void*, std::size_t, int) {
  errno = fake->register_error;
  if (errno != 0) return nullptr;
  for (const auto& handle : handles) {
    if (&handle->domain != domain) continue;
    ++fake->open;
    return &handle->region;
  }
  std::abort();
}

int dereg_mr(ibv_mr*) { return --fake->open, 0; }

void write_line(const std::filesystem::path& file, const std::string& line) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << line << '\n';
}

}  // namespace

FakeVerbs::FakeVerbs() {
  fake = this;
  std::string folder = std::filesystem::temp_directory_path() / "moolink-verbs-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) std::abort();
  sysfs_ = folder;
  library_.get_device_list = get_device_list;
  library_.free_device_list = free_device_list;
  library_.get_device_name = get_device_name;
  library_.open_device = open_device;
  library_.close_device = close_device;
  library_.query_device = query_device;
  library_.query_port = query_port;
  library_.query_gid = query_gid;
  library_.alloc_pd = alloc_pd;
  library_.dealloc_pd = dealloc_pd;
  library_.reg_mr = reg_mr;
  library_.dereg_mr = dereg_mr;
}

FakeVerbs::~FakeVerbs() {
  fake = nullptr;
  handles.clear();
  std::filesystem::remove_all(sysfs_);
}

void FakeVerbs::add(FakeDevice device) {
  auto handle = std::make_unique<Handle>();
  device.name.copy(handle->device.name, sizeof handle->device.name - 1);
  handles.push_back(std::move(handle));
  const auto folder = sysfs_ / "class/infiniband" / device.name;
  if (!device.pci.empty()) {
    std::filesystem::create_directories(folder);
    std::filesystem::create_directories(sysfs_ / "devices" / device.pci);
    std::filesystem::create_directory_symlink(sysfs_ / "devices" / device.pci, folder / "device");
  }
  write_line(folder / "device/numa_node", std::to_string(device.numa_node));
  for (std::size_t port = 0; port < device.ports.size(); ++port) {
    const std::vector<FakeGid>& gids = device.ports[port].gids;
    const auto types = folder / "ports" / std::to_string(port + 1) / "gid_attrs/types";
    for (std::size_t i = 0; i < gids.size(); ++i) {
      write_line(types / std::to_string(i), gids[i].type);
    }
  }
  devices_.push_back(std::move(device));
}

void FakeVerbs::add_gpu(const std::string& pci) {
  const std::filesystem::path place = sysfs_ / "devices" / pci;
  const auto links = sysfs_ / "bus/pci/devices";
  std::filesystem::create_directories(place);
  std::filesystem::create_directories(links);
  std::filesystem::create_directory_symlink(place, links / place.filename());
  std::filesystem::create_directories(sysfs_ / "proc/driver/nvidia/gpus" / place.filename());
}

Preferences FakeVerbs::preferences() const {
  Preferences preferences;
  preferences.folders = {sysfs_, sysfs_ / "proc"};
  return preferences;
}

ibv_gid gid_of(const char* text) {
  ibv_gid gid{};
  if (inet_pton(AF_INET6, text, gid.raw) != 1) std::abort();
  return gid;
}

}  // namespace moolink::transport::verbs
