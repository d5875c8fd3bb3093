#include "base/crash_point.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>

namespace moolink {
namespace {

struct Target {
  std::string name;
  long passages = 1;
};

Target target_from_environment() {
  const char* text = std::getenv("MOOLINK_CRASH_AT");
  if (text == nullptr) return {};
  Target target{text, 1};
  if (const auto colon = target.name.find(':'); colon != std::string::npos) {
    target.passages = std::strtol(target.name.c_str() + colon + 1, nullptr, 10);
    target.name.resize(colon);
  }
  return target;
}

}  // namespace

void crash_point(const char* name) {
  static const Target target = target_from_environment();
  static std::atomic<long> passed{0};
  if (target.name.empty() || target.name != name) return;
  if (passed.fetch_add(1) + 1 == target.passages) kill(getpid(), SIGKILL);
}

}  // namespace moolink
