#pragma once

// Places where a test may end the process: MOOLINK_CRASH_AT=cut.sent, or cut.sent:3 for the third
// pass. Compiled in only for development builds (MOOLINK_CRASH_POINTS).

#ifdef MOOLINK_CRASH_POINTS
namespace moolink {

void crash_point(const char* name);

}  // namespace moolink
#else
namespace moolink {

constexpr void crash_point(const char*) {}

}  // namespace moolink
#endif
