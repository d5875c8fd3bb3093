// Which device, port and GID is chosen, and what is said where none is.

#include <cerrno>
#include <cstdlib>

#include "base/error.h"
#include "check.h"
#include "fake_verbs.h"

namespace moolink::transport::verbs {
namespace verbs_choice_test {

const char* const kV4 = "::ffff:10.77.0.1";
const char* const kGlobal = "2001:db8::1";
const char* const kLinkLocal = "fe80::5054:ff:fe00:7701";

FakeDevice roce(const std::string& name, std::vector<FakeGid> gids, std::uint8_t speed = 32) {
  FakePort port;
  port.speed = speed;
  port.gids = std::move(gids);
  return {name, {port}};
}

bool says(const std::string& text, const std::string& words) {
  if (text.find(words) != std::string::npos) return true;
  const std::string what = "'" + text + "' does not say '" + words + "'";
  check::fail(__FILE__, __LINE__, what.c_str());
  return false;
}

const LoadedLibrary& not_installed() {
  static const LoadedLibrary none{nullptr, "", "libibverbs.so.1: cannot open shared object file"};
  return none;
}

const Library* faked = nullptr;
const LoadedLibrary& installed() {
  static LoadedLibrary library;
  library = {faked, "libibverbs.so.1", ""};
  return library;
}

TEST("verbs: an IPv4 GID of RoCE v2 is chosen before a global and a link-local one") {
  FakeVerbs fake;
  fake.add(roce("rxe0", {{gid_of(kLinkLocal)},
                         {gid_of(kV4), "IB/RoCE v1"},
                         {gid_of(kGlobal)},
                         {gid_of(kV4)},
                         {gid_of("::ffff:10.77.0.2")}}));
  const Choice choice = choose(fake.library(), fake.preferences());
  CHECK(choice.port.has_value());
  CHECK_EQ(choice.port->gid_index, 3);
  CHECK_EQ(choice.port->device, "rxe0");
  CHECK_EQ(choice.port->gigabits, 100);
  CHECK(!choice.port->infiniband);
  CHECK(says(choice.port->text(), "rxe0 port 1, RoCE v2, GID 3 (::ffff:10.77.0.1), 100 Gbit/s"));
  CHECK_EQ(fake.open, 0);
}

TEST("verbs: without IPv4 the global GID is chosen, without that the link-local one") {
  FakeVerbs fake;
  fake.add(roce("a", {{gid_of(kLinkLocal)}, {gid_of(kGlobal)}}, 64));
  fake.add(roce("b", {{gid_of("::")}, {gid_of(kLinkLocal)}}, 128));
  Preferences preferences = fake.preferences();
  CHECK_EQ(choose(fake.library(), preferences).port->gid_index, 1);
  preferences.device = "a";
  CHECK_EQ(choose(fake.library(), preferences).port->gid_index, 1);
  CHECK_EQ(choose(fake.library(), preferences).port->device, "a");
}

TEST("verbs: the fastest active port is chosen, of equals the one at this NUMA node") {
  FakeVerbs fake;
  FakeDevice down = roce("a_down", {{gid_of(kV4)}}, 128);
  down.ports[0].state = IBV_PORT_DOWN;
  fake.add(down);
  fake.add(roce("b_slow", {{gid_of(kV4)}}, 4));
  FakeDevice far = roce("c_far", {{gid_of(kV4)}});
  far.numa_node = 0;
  fake.add(far);
  FakeDevice near = roce("d_near", {{gid_of(kV4)}});
  near.numa_node = 1;
  fake.add(near);
  Preferences preferences = fake.preferences();
  CHECK_EQ(choose(fake.library(), preferences).port->device, "c_far");
  preferences.near_node = 1;
  const Choice choice = choose(fake.library(), preferences);
  CHECK_EQ(choice.port->device, "d_near");
  CHECK_EQ(choice.ports.size(), 4u);
  says(choice.ports[0], "a_down port 1: its link is down");
}

TEST("verbs: of equally fast ports the one near the process's GPU is chosen") {
  FakeVerbs fake;
  FakeDevice far = roce("a_far", {{gid_of(kV4)}});
  far.pci = "pci0000:16/0000:16:01.0/0000:17:00.0";
  far.numa_node = 1;
  fake.add(far);
  FakeDevice near = roce("b_near", {{gid_of(kV4)}});
  near.pci = "pci0000:80/0000:80:01.0/0000:81:02.0/0000:83:00.0";
  fake.add(near);
  fake.add_gpu("pci0000:80/0000:80:01.0/0000:81:01.0/0000:82:00.0");
  Preferences preferences = fake.preferences();
  preferences.near_node = 1;
  CHECK_EQ(choose(fake.library(), preferences).port->device, "b_near");
  says(choose(fake.library(), preferences).port->text(), "near the GPU");
  // Of several GPUs it is known by its number only, in the order of their addresses.
  fake.add_gpu("pci0000:16/0000:16:01.0/0000:18:00.0");
  CHECK_EQ(choose(fake.library(), preferences).port->device, "a_far");
  preferences.visible_gpus = "1";
  CHECK_EQ(choose(fake.library(), preferences).port->device, "b_near");
  preferences.visible_gpus = "0";
  preferences.near_node = 0;
  CHECK_EQ(choose(fake.library(), preferences).port->device, "a_far");
  for (const char* unknown : {"2", "0,1", "GPU-8932f937"}) {
    preferences.visible_gpus = unknown;
    CHECK_EQ(choose(fake.library(), preferences).port->gpu_nodes, 0);
  }
}

TEST("verbs: InfiniBand is addressed by its LID") {
  FakeVerbs fake;
  FakePort port;
  port.infiniband = true;
  port.lid = 17;
  port.gids = {{gid_of("fe80::1"), "IB/RoCE v1"}};
  FakePort unmanaged = port;
  unmanaged.lid = 0;
  fake.add({"mlx5_0", {unmanaged, port}});
  const Choice choice = choose(fake.library(), fake.preferences());
  CHECK_EQ(int{choice.port->number}, 2);
  CHECK(choice.port->infiniband);
  says(choice.port->text(), "mlx5_0 port 2, InfiniBand, LID 17");
  says(choice.ports[0], "no subnet manager");
}

TEST("verbs: what the user names is taken or refused by name") {
  FakeVerbs fake;
  fake.add(roce("rxe0", {{gid_of(kV4)}, {gid_of(kGlobal)}, {gid_of(kV4), "IB/RoCE v1"}}));
  Preferences preferences = fake.preferences();
  preferences.gid_index = 1;
  CHECK_EQ(choose(fake.library(), preferences).port->gid_index, 1);
  preferences.gid_index = 2;
  CHECK(!choose(fake.library(), preferences).port);
  says(choose(fake.library(), preferences).reason,
       "GID 2 (MOOLINK_VERBS_GID_INDEX) is not one of RoCE");
  preferences.gid_index = 9;
  says(choose(fake.library(), preferences).reason, "no GID 9 (MOOLINK_VERBS_GID_INDEX)");
  preferences = fake.preferences();
  preferences.port = 2;
  says(choose(fake.library(), preferences).reason, "port 2 (MOOLINK_VERBS_PORT) cannot be used");
  preferences = fake.preferences();
  preferences.device = "mlx5_0";
  says(choose(fake.library(), preferences).reason, "no RDMA device is called 'mlx5_0'");
  CHECK_EQ(fake.open, 0);
}

TEST("verbs: a variable that is no number is refused by name") {
  const auto set = [](const char* value) { setenv("MOOLINK_VERBS_PORT", value, 1); };
  set("first");
  CHECK_THROWS(Preferences::from_environment(), ErrorCode::invalid_argument);
  set("-1");
  CHECK_THROWS(Preferences::from_environment(), ErrorCode::invalid_argument);
  set("2");
  CHECK_EQ(Preferences::from_environment().port, 2);
  unsetenv("MOOLINK_VERBS_PORT");
  CHECK_EQ(Preferences::from_environment().port, 0);
}

TEST("verbs: the number of queue pairs of a connection can be chosen, from 1 to 8") {
  FakeVerbs fake;
  fake.add(roce("rxe0", {{gid_of(kV4)}}));
  const auto with = [&](const char* value) {
    setenv("MOOLINK_VERBS_QUEUE_PAIRS", value, 1);
    Preferences preferences = fake.preferences();
    preferences.queue_pairs = Preferences::from_environment().queue_pairs;
    return choose(fake.library(), preferences).port->queue_pairs;
  };
  CHECK_EQ(with("1"), std::size_t{1});
  CHECK_EQ(with("8"), std::size_t{8});
  for (const char* wrong : {"0", "9", "many"}) {
    setenv("MOOLINK_VERBS_QUEUE_PAIRS", wrong, 1);
    CHECK_THROWS(Preferences::from_environment(), ErrorCode::invalid_argument);
  }
  unsetenv("MOOLINK_VERBS_QUEUE_PAIRS");
  CHECK_EQ(Preferences::from_environment().queue_pairs, 2);
}

TEST("verbs: without a device the library is not loaded") {
  FakeVerbs fake;
  const Availability found =
      look(fake.preferences(), []() -> const LoadedLibrary& { std::abort(); });
  CHECK(!found.usable);
  says(found.reason, "no RDMA device");
}

TEST("verbs: MOOLINK_VERBS_DEVICE=none leaves a device alone") {
  FakeVerbs fake;
  fake.add(roce("rxe0", {{gid_of(kV4)}}));
  Preferences preferences = fake.preferences();
  preferences.device = "none";
  const Availability found = look(preferences, []() -> const LoadedLibrary& { std::abort(); });
  CHECK(!found.usable);
  says(found.reason, "MOOLINK_VERBS_DEVICE is 'none'");
}

TEST("verbs: each lack has its reason") {
  FakeVerbs fake;
  fake.add(roce("rxe0", {{gid_of(kV4)}}));
  faked = &fake.library();
  CHECK(look(fake.preferences(), installed).usable);
  says(look(fake.preferences(), not_installed).reason, "cannot open shared object file");
  fake.list_error = ENOSYS;
  says(look(fake.preferences(), installed).reason, "the kernel has no RDMA");
  fake.list_error = EPERM;
  says(look(fake.preferences(), installed).reason, "cannot be listed: Operation not permitted");
  fake.list_error = 0;
  fake.register_error = ENOMEM;
  const Availability limited = look(fake.preferences(), installed);
  CHECK(!limited.usable);
  says(limited.reason, "rxe0 registers no memory: Cannot allocate memory");
  CHECK_EQ(limited.devices.size(), 1u);
  CHECK_EQ(fake.open, 0);
}

TEST("verbs: a device that cannot be opened is named, and another one is taken") {
  FakeVerbs fake;
  FakeDevice closed = roce("a", {{gid_of(kV4)}});
  closed.open_error = EACCES;
  fake.add(closed);
  faked = &fake.library();
  says(look(fake.preferences(), installed).reason, "a: cannot be opened: Permission denied");
  fake.add(roce("b", {{gid_of(kV4)}}));
  const Availability found = look(fake.preferences(), installed);
  CHECK(found.usable);
  says(found.chosen, "b port 1");
}

TEST("verbs: a device without an address is of no use") {
  FakeVerbs fake;
  fake.add(roce("rxe0", {{gid_of("::")}, {gid_of(kV4), "IB/RoCE v1"}}));
  faked = &fake.library();
  says(look(fake.preferences(), installed).reason, "its network interface has no address");
}

}  // namespace verbs_choice_test
}  // namespace moolink::transport::verbs
