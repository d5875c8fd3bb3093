#include "base/names.h"

#include <algorithm>

#include "base/error.h"

namespace moolink {

namespace {

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

}  // namespace

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= kMaxName && std::ranges::none_of(text, is_control);
}

std::string in_one_line(std::string text) {
  std::ranges::replace_if(text, is_control, '?');
  return text;
}

void check_name(std::string_view what, const std::string& name) {
  if (is_name(name)) return;
  throw Exception(ErrorCode::invalid_argument, std::string(what) + " has 1 to " +
                                                   std::to_string(kMaxName) +
                                                   " bytes and no control characters");
}

}  // namespace moolink
