#pragma once

// One number that a hostile peer lies about, for tests: see lies.h.

#include <cstdint>

namespace moolink::wire {

#ifdef MOOLINK_CRASH_POINTS
// Changes the number if MOOLINK_LIE names it.
void lie(const char* name, std::uint64_t& number);
#else
constexpr void lie(const char* /*name*/, std::uint64_t& /*number*/) {}
#endif

}  // namespace moolink::wire
