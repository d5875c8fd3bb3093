#include "base/utf8.h"

#include <cstddef>
#include <cstdint>

namespace moolink {

bool is_utf8(std::string_view bytes) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const auto lead = static_cast<std::uint8_t>(bytes[at]);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xc2 ? 0
                               : lead < 0xe0 ? 2
                               : lead < 0xf0 ? 3
                               : lead < 0xf5 ? 4
                                             : 0;
    if (length == 0 || length > bytes.size() - at) return false;
    for (std::size_t i = 1; i < length; ++i) {
      if ((static_cast<std::uint8_t>(bytes[at + i]) & 0xc0) != 0x80) return false;
    }
    if (length > 2) {
      const auto second = static_cast<std::uint8_t>(bytes[at + 1]);
      const bool overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
      const bool surrogate = lead == 0xed && second > 0x9f;
      const bool beyond = lead == 0xf4 && second > 0x8f;
      if (overlong || surrogate || beyond) return false;
    }
    at += length;
  }
  return true;
}

}  // namespace moolink
