#include "transport/verbs/choice.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <tuple>

#include "base/buffer.h"
#include "base/environment_variable.h"
#include "base/error.h"
#include "transport/verbs/device.h"
#include "transport/verbs/queue_pairs.h"

namespace moolink::transport::verbs {
namespace {

constexpr const char* kDevice = "MOOLINK_VERBS_DEVICE";
constexpr const char* kPort = "MOOLINK_VERBS_PORT";
constexpr const char* kGidIndex = "MOOLINK_VERBS_GID_INDEX";
constexpr const char* kQueuePairs = "MOOLINK_VERBS_QUEUE_PAIRS";
constexpr const char* kGpuDirect = "MOOLINK_VERBS_GPUDIRECT";
constexpr int kMostGids = 256;  // examined, of one port
// The minimum a connection registers: its messages, before any array.
constexpr std::size_t kLeastRegistered = std::size_t{1} << 20;

std::string first_line(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

double gigabits(const ibv_port_attr& port) {
  constexpr std::array<std::pair<int, double>, 8> kLane = {
      {{1, 2.5}, {2, 5}, {4, 10}, {8, 10}, {16, 14}, {32, 25}, {64, 50}, {128, 100}}};
  constexpr std::array<std::pair<int, int>, 5> kLanes = {
      {{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}}};
  double lane = 0;
  for (const auto& [code, speed] : kLane) lane = code == port.active_speed ? speed : lane;
  for (const auto& [code, lanes] : kLanes) {
    if (code == port.active_width) return lane * lanes;
  }
  return lane;
}

bool is_zero(const ibv_gid& gid) {
  return std::all_of(std::begin(gid.raw), std::end(gid.raw), [](std::uint8_t b) { return b == 0; });
}

// An IPv4 address reaches as far as the routers allow, a link-local one only its link.
int reach(const ibv_gid& gid) {
  constexpr std::array<std::uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::memcmp(gid.raw, kMapped.data(), kMapped.size()) == 0) return 2;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80 ? 0 : 1;
}

// Examines one port. Throws Exception{error} with its fault.
class PortLook {
 public:
  PortLook(const Library& library, ibv_context* context, const Preferences& preferences, Port& port)
      : library_(library), context_(context), preferences_(preferences), port_(port) {}

  void look() {
    auto attributes = zeroed<ibv_port_attr>();
    if (library_.query_port(context_, port_.number, &attributes) != 0) {
      refuse("cannot be asked: " + std::string(std::strerror(errno)));
    }
    port_.infiniband = attributes.link_layer == IBV_LINK_LAYER_INFINIBAND;
    port_.lid = attributes.lid;
    port_.mtu = attributes.active_mtu;
    port_.gigabits = gigabits(attributes);
    if (attributes.state != IBV_PORT_ACTIVE) refuse("its link is down");
    if (port_.infiniband) {
      if (port_.lid == 0) refuse("it has no LID (no subnet manager has spoken to it)");
      port_.gid_index = std::max(0, preferences_.gid_index);
      if (!take_gid(port_.gid_index)) refuse("it has no GID " + std::to_string(port_.gid_index));
      return;
    }
    choose_gid(std::min(attributes.gid_tbl_len, kMostGids));
  }

 private:
  [[noreturn]] static void refuse(std::string why) {
    throw Exception(ErrorCode::error, std::move(why));
  }

  bool take_gid(int index) {
    ibv_gid gid{};
    if (library_.query_gid(context_, port_.number, index, &gid) != 0 || is_zero(gid)) return false;
    port_.gid = gid;
    port_.gid_index = index;
    return true;
  }

  bool is_roce_v2(int index) const {
    const auto types = preferences_.folders.sys / "class/infiniband" / port_.device / "ports" /
                       std::to_string(port_.number) / "gid_attrs/types";
    return first_line(types / std::to_string(index)) == "RoCE v2";
  }

  void choose_gid(int count) {
    if (preferences_.gid_index >= 0) {
      if (!take_gid(preferences_.gid_index)) {
        refuse("it has no GID " + std::to_string(preferences_.gid_index) + " (" + kGidIndex + ")");
      }
      if (!is_roce_v2(preferences_.gid_index)) {
        refuse("its GID " + std::to_string(preferences_.gid_index) + " (" + kGidIndex +
               ") is not one of RoCE v2");
      }
      return;
    }
    std::optional<int> best;
    int best_reach = -1;
    for (int index = 0; index < count; ++index) {
      if (!is_roce_v2(index) || !take_gid(index) || reach(port_.gid) <= best_reach) continue;
      best = index;
      best_reach = reach(port_.gid);
    }
    if (!best) refuse("it has no GID of RoCE v2: its network interface has no address");
    take_gid(*best);
  }

  const Library& library_;
  ibv_context* context_;
  const Preferences& preferences_;
  Port& port_;
};

struct CloseDevice {
  const Library& library;
  void operator()(ibv_context* context) const { library.close_device(context); }
};
using OpenedDevice = std::unique_ptr<ibv_context, CloseDevice>;

void look_at_device(const Library& library, ibv_device* device, const Preferences& preferences,
                    std::vector<Port>& usable, std::vector<std::string>& lines) {
  const std::string name = library.get_device_name(device);
  const OpenedDevice context(library.open_device(device), CloseDevice{library});
  ibv_device_attr attributes{};
  if (context == nullptr || library.query_device(context.get(), &attributes) != 0) {
    lines.push_back(name + ": cannot be opened: " + std::strerror(errno) +
                    " (is /dev/infiniband there, and readable?)");
    return;
  }
  Port of_device;
  of_device.device = name;
  of_device.numa_node = numa_node_of(preferences.folders, name);
  of_device.gpu_nodes = common_nodes(pci_place_of(preferences.folders, name),
                                     only_gpu(preferences.folders, preferences.visible_gpus));
  of_device.queue_pairs = static_cast<std::size_t>(preferences.queue_pairs);
  of_device.gpudirect = preferences.gpudirect;
  for (int number = 1; number <= attributes.phys_port_cnt; ++number) {
    Port port = of_device;
    port.number = static_cast<std::uint8_t>(number);
    const bool asked_for = preferences.port == 0 || preferences.port == number;
    try {
      PortLook(library, context.get(), preferences, port).look();
      lines.push_back(port.text());
      if (asked_for) usable.push_back(std::move(port));
    } catch (const Exception& against) {
      lines.push_back(name + " port " + std::to_string(number) + ": " + against.error().message);
    }
  }
}

// Whether memory can be registered there at all.
std::string try_to_register(const Library& library, const Port& port) {
  int count = 0;
  ibv_device** list = library.get_device_list(&count);
  std::string reason = port.device + " has gone";
  for (int i = 0; list != nullptr && i < count; ++i) {
    if (library.get_device_name(list[i]) != port.device) continue;
    const OpenedDevice context(library.open_device(list[i]), CloseDevice{library});
    ibv_pd* domain = context == nullptr ? nullptr : library.alloc_pd(context.get());
    if (domain == nullptr) {
      reason = port.device + " cannot be opened: " + std::strerror(errno);
      break;
    }
    const MutableBuffer memory = HeapAllocator().allocate(kLeastRegistered);
    ibv_mr* region = library.reg_mr(domain, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE);
    reason = region != nullptr
                 ? ""
                 : port.device + " registers no memory: " + registration_failure(errno);
    if (region != nullptr) library.dereg_mr(region);
    library.dealloc_pd(domain);
  }
  if (list != nullptr) library.free_device_list(list);
  return reason;
}

}  // namespace

Preferences Preferences::from_environment() {
  Preferences preferences;
  preferences.device = environment_variable(kDevice);
  preferences.port = number_variable(kPort, 0, 0, 255);
  preferences.gid_index = number_variable(kGidIndex, -1, 0, 65535);
  preferences.queue_pairs =
      number_variable(kQueuePairs, preferences.queue_pairs, 1, QueuePairs::kMost);
  preferences.gpudirect = switch_variable(kGpuDirect).value_or(false);
  preferences.visible_gpus = environment_variable("CUDA_VISIBLE_DEVICES");
  unsigned node = 0;
  if (getcpu(nullptr, &node) == 0) preferences.near_node = static_cast<int>(node);
  return preferences;
}

bool has_devices(const Folders& folders) {
  std::error_code error;
  const std::filesystem::path folder = folders.sys / "class/infiniband";
  return std::filesystem::directory_iterator(folder, error) !=
         std::filesystem::directory_iterator();
}

Choice choose(const Library& library, const Preferences& preferences) {
  Choice choice;
  int count = 0;
  errno = 0;
  ibv_device** list = library.get_device_list(&count);
  if (list == nullptr) {
    choice.reason = errno == ENOSYS
                        ? "the kernel has no RDMA (module ib_uverbs)"
                        : "RDMA devices cannot be listed: " + std::string(std::strerror(errno));
    return choice;
  }
  std::vector<Port> usable;
  bool named = preferences.device.empty();
  for (int i = 0; i < count; ++i) {
    if (!preferences.device.empty() && library.get_device_name(list[i]) != preferences.device)
      continue;
    named = true;
    look_at_device(library, list[i], preferences, usable, choice.ports);
  }
  library.free_device_list(list);
  if (count == 0) {
    choice.reason = "no RDMA device: the library shows none to this process";
  } else if (!named) {
    choice.reason = "no RDMA device is called '" + preferences.device + "' (" + kDevice + ")";
  } else if (usable.empty()) {
    choice.reason = preferences.port == 0 ? "no port of an RDMA device can be used"
                                          : "port " + std::to_string(preferences.port) + " (" +
                                                kPort + ") cannot be used";
    for (const std::string& line : choice.ports) choice.reason += "; " + line;
  }
  if (usable.empty()) return choice;
  const auto rank = [&](const Port& port) {
    const bool near = port.numa_node >= 0 && port.numa_node == preferences.near_node;
    return std::tuple(port.gigabits, port.gpu_nodes, near);
  };
  // The first of equals, in the order of the library.
  choice.port = *std::max_element(usable.begin(), usable.end(),
                                  [&](const Port& a, const Port& b) { return rank(a) < rank(b); });
  return choice;
}

Availability look(const Preferences& preferences, const LoadedLibrary& (*load)()) {
  Availability found;
  if (preferences.device == "none") {
    found.reason = std::string(kDevice) + " is 'none'";
    return found;
  }
  if (!has_devices(preferences.folders)) {
    found.reason =
        "no RDMA device (" + preferences.folders.sys.string() + "/class/infiniband is empty)";
    return found;
  }
  const LoadedLibrary& library = load();
  found.library = library.file;
  if (library.functions == nullptr) {
    found.reason = "there is an RDMA device, but its library cannot be used: " + library.reason;
    return found;
  }
  const Choice choice = choose(*library.functions, preferences);
  found.devices = choice.ports;
  found.reason = choice.reason;
  if (!choice.port) return found;
  found.chosen = choice.port->text();
  found.reason = try_to_register(*library.functions, *choice.port);
  found.usable = found.reason.empty();
  return found;
}

const Availability& availability() {
  static const Availability found = [] {
    try {
      return look(Preferences::from_environment(), load_library);
    } catch (const Exception& e) {
      Availability nothing;
      nothing.reason = e.error().message;
      return nothing;
    }
  }();
  return found;
}

}  // namespace moolink::transport::verbs
