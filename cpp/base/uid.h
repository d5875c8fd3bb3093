#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <tuple>

#include "base/random.h"

namespace moolink {

// 128 random bits: a peer's instance id, a group's lineage, a host key. All zero means "none".
struct Uid {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  static Uid random(Random& random) { return {random.next(), random.next()}; }
  // From the operating system's entropy; for real processes, never inside a machine.
  static Uid from_entropy();

  bool empty() const { return high == 0 && low == 0; }
  explicit operator bool() const { return !empty(); }
  std::string hex() const;  // 32 hexadecimal digits

  auto operator<=>(const Uid&) const = default;

  auto fields() { return std::tie(high, low); }
};

std::uint64_t entropy64();

}  // namespace moolink
