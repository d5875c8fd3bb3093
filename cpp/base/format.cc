#include "base/format.h"

#include <chrono>
#include <cstdio>

namespace moolink {

namespace {

// With three digits, from 1000 with all digits before the point.
std::string with_unit(double value, const char* unit) {
  char text[32];
  std::snprintf(text, sizeof text, value < 999.5 ? "%.3g %s" : "%.0f %s", value, unit);
  return text;
}

}  // namespace

std::string in_seconds(Duration duration) {
  return with_unit(std::chrono::duration<double>(duration).count(), "s");
}

std::string in_milliseconds(Duration duration) {
  return with_unit(std::chrono::duration<double, std::milli>(duration).count(), "ms");
}

std::string grouped(std::int64_t number) {
  std::string text = std::to_string(number);
  const std::size_t digits = number < 0 ? 1 : 0;  // where they begin
  for (std::size_t end = text.size(); end > digits + 3;) text.insert(end -= 3, 1, ',');
  return text;
}

}  // namespace moolink
