#pragma once

#include <cstdint>

namespace moolink {

// The least multiple of `unit` that is not below `value`.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace moolink
