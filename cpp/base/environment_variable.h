#pragma once

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <system_error>

#include "base/error.h"

namespace moolink {

// The value of an environment variable; "" if it is not set.
inline std::string environment_variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Whether a variable turns a feature on; none: it is not set or empty. Throws
// Exception{invalid_argument} if it is neither 0 nor 1.
inline std::optional<bool> switch_variable(const char* name) {
  const std::string value = environment_variable(name);
  if (value.empty()) return std::nullopt;
  if (value == "0" || value == "1") return value == "1";
  throw Exception(ErrorCode::invalid_argument,
                  std::string(name) + " is '" + value + "': 1 turns it on, 0 turns it off");
}

// A number from `least` to `most`; `otherwise`, if the variable is not set or empty. Throws
// Exception{invalid_argument} if it has another value.
inline int number_variable(const char* name, int otherwise, int least, int most) {
  const std::string text = environment_variable(name);
  if (text.empty()) return otherwise;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw Exception(ErrorCode::invalid_argument,
                    std::string(name) + " is '" + text + "', not a number from " +
                        std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

}  // namespace moolink
