#include "base/uid.h"

#include <sys/random.h>

#include <cstdlib>

namespace moolink {

std::uint64_t entropy64() {
  std::uint64_t value = 0;
  // getrandom(2) never fails for 8 bytes once the pool is initialised; before that it blocks.
  while (getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) {
  }
  return value;
}

Uid Uid::from_entropy() { return {entropy64(), entropy64()}; }

std::string Uid::hex() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(32, '0');
  for (int i = 0; i < 16; ++i) {
    text[static_cast<std::size_t>(15 - i)] = kDigits[(high >> (4 * i)) & 15];
    text[static_cast<std::size_t>(31 - i)] = kDigits[(low >> (4 * i)) & 15];
  }
  return text;
}

}  // namespace moolink
