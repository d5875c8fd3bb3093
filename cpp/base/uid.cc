#include "base/uid.h"

#include <sys/random.h>

#include <cinttypes>
#include <cstdio>

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
  char text[33];
  std::snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, high, low);
  return text;
}

}  // namespace moolink
