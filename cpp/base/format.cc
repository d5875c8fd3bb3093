#include "base/format.h"

#include <chrono>
#include <cstdio>

namespace moolink {

std::string in_seconds(Duration duration) {
  char text[32];
  const double value = std::chrono::duration<double>(duration).count();
  std::snprintf(text, sizeof text, value < 999.5 ? "%.3g s" : "%.0f s", value);
  return text;
}

std::string in_milliseconds(Duration duration) {
  char text[32];
  const double value = std::chrono::duration<double, std::milli>(duration).count();
  std::snprintf(text, sizeof text, value < 999.5 ? "%.3g ms" : "%.0f ms", value);
  return text;
}

}  // namespace moolink
