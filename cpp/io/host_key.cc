#include "io/host_key.h"

#include <sys/stat.h>

#include <fstream>

#include "base/random.h"

namespace moolink::io {

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

Uid host_key() {
  // FNV-1a over the boot id, then mixed with the namespace's inode.
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : boot_id()) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  struct stat status{};
  const bool known = stat("/proc/self/ns/net", &status) == 0;
  // If /proc cannot be read the key is random: no peer is then taken for a neighbour by mistake.
  if (boot_id().empty() || !known) return Uid::from_entropy();
  Random random(hash ^ (static_cast<std::uint64_t>(status.st_ino) * 0x9e3779b97f4a7c15ULL));
  return Uid::random(random);
}

}  // namespace moolink::io
