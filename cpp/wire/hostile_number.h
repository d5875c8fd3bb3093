#pragma once

// One number that a hostile peer falsifies, for tests: see hostile_messages.h.

#include <cstdint>
#include <optional>

namespace moolink::wire {

#ifdef MOOLINK_CRASH_POINTS
// The value of MOOLINK_LIE for the number of this name; none: the true one.
std::optional<std::uint64_t> lie_about(const char* name);
#else
constexpr std::optional<std::uint64_t> lie_about(const char* /*name*/) { return std::nullopt; }
#endif

// Changes the number if MOOLINK_LIE names it.
template <class Number>
constexpr void lie(const char* name, Number& number) {
  if (const auto told = lie_about(name)) number = static_cast<Number>(*told);
}

}  // namespace moolink::wire
