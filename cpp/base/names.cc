#include "base/names.h"

#include <algorithm>

#include "base/error.h"

namespace moolink {

bool is_name(std::string_view text) {
  const bool printable = std::ranges::none_of(
      text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  return !text.empty() && text.size() <= kMaxName && printable;
}

void check_name(std::string_view what, const std::string& name) {
  if (is_name(name)) return;
  throw Exception(ErrorCode::invalid_argument, std::string(what) + " has 1 to " +
                                                   std::to_string(kMaxName) +
                                                   " bytes and no control characters");
}

}  // namespace moolink
