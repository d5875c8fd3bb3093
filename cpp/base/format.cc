#include "base/format.h"

#include <chrono>
#include <cstdio>

namespace moolink {

std::string in_seconds(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(duration).count());
  return text;
}

std::string in_milliseconds(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g ms",
                std::chrono::duration<double, std::milli>(duration).count());
  return text;
}

}  // namespace moolink
