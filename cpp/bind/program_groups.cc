#include "bind/program_groups.h"

#include <map>
#include <mutex>

#include "base/at_fork.h"

namespace moolink::bind {
namespace {

struct Groups {
  std::mutex mutex;
  HeldOverForks over_forks{mutex};
  std::map<std::string, std::weak_ptr<runtime::GroupPeer>> by_key;
};

// Never destroyed: programs may run until the very end of the process.
Groups& groups() {
  static Groups* const known = new Groups;
  return *known;
}

}  // namespace

std::string add_program_group(const std::shared_ptr<runtime::GroupPeer>& group) {
  Groups& known = groups();
  const std::lock_guard guard(known.mutex);
  std::string key = group->name();
  for (int number = 2; known.by_key.contains(key) && !known.by_key[key].expired(); ++number) {
    key = group->name() + "#" + std::to_string(number);
  }
  known.by_key[key] = group;
  return key;
}

void remove_program_group(const std::string& key) {
  Groups& known = groups();
  const std::lock_guard guard(known.mutex);
  known.by_key.erase(key);
}

std::shared_ptr<runtime::GroupPeer> find_program_group(const std::string& key) {
  Groups& known = groups();
  const std::lock_guard guard(known.mutex);
  const auto found = known.by_key.find(key);
  return found == known.by_key.end() ? nullptr : found->second.lock();
}

}  // namespace moolink::bind
