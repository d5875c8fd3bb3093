#include "base/names.h"

#include <algorithm>

#include "base/error.h"

namespace moolink {

void check_name(std::string_view what, const std::string& name) {
  const bool printable = std::ranges::none_of(
      name, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  if (!name.empty() && name.size() <= kMaxName && printable) return;
  throw Exception(ErrorCode::invalid_argument, std::string(what) + " has 1 to " +
                                                   std::to_string(kMaxName) +
                                                   " bytes and no control characters");
}

}  // namespace moolink
