#pragma once

// Places where a test may end the process: MOOLINK_CRASH_AT=cut.sent, or cut.sent:3 for the third
// pass. Development builds (MOOLINK_CRASH_POINTS) compile in tests/hooks/base/crash_point.cc.

#ifdef MOOLINK_CRASH_POINTS
namespace moolink {

void crash_point(const char* name);

}  // namespace moolink
#else
namespace moolink {

constexpr void crash_point(const char*) {}

}  // namespace moolink
#endif
