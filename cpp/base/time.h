#pragma once

#include <chrono>

namespace moolink {

// Machines get the time from their callers; only io, runtime and bind read a clock.
using Duration = std::chrono::nanoseconds;
using Time = std::chrono::time_point<std::chrono::steady_clock, Duration>;

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline constexpr Time kNever = Time::max();

}  // namespace moolink
