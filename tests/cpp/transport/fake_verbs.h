#pragma once

// A libibverbs without devices: what a machine shows is written down by the test.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "transport/verbs/choice.h"
#include "transport/verbs/library.h"

namespace moolink::transport::verbs {

struct FakeGid {
  ibv_gid gid{};
  std::string type = "RoCE v2";
};

struct FakePort {
  ibv_port_state state = IBV_PORT_ACTIVE;
  bool infiniband = false;
  std::uint16_t lid = 0;
  std::uint8_t speed = 32;  // 25 Gbit/s a lane
  std::uint8_t width = 2;   // four lanes
  std::vector<FakeGid> gids;
};

struct FakeDevice {
  std::string name;
  std::vector<FakePort> ports;
  int numa_node = -1;
  std::string pci{};  // its place: "pci0000:00/0000:00:01.0/0000:01:00.0"; empty: none
  int open_error = 0;
};

// One at a time: the functions of the library know no "this".
class FakeVerbs {
 public:
  FakeVerbs();
  ~FakeVerbs();
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  // Shows the device to the system and to the library.
  void add(FakeDevice device);
  // Shows a GPU at this place to the system.
  void add_gpu(const std::string& pci);
  const Library& library() const { return library_; }
  Preferences preferences() const;
  const std::vector<FakeDevice>& devices() const { return devices_; }

  int list_error = 0;      // of ibv_get_device_list; 0: it succeeds
  int register_error = 0;  // of ibv_reg_mr
  int open = 0;            // devices, domains and regions that are open now
  bool listed = false;     // the library was asked for its devices

 private:
  Library library_;
  std::filesystem::path sysfs_;
  std::vector<FakeDevice> devices_;
};

ibv_gid gid_of(const char* text);  // an IPv6 address, or one of IPv4 mapped into it

}  // namespace moolink::transport::verbs
