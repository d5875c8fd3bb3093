#pragma once

#include <string>

#include "base/time.h"

namespace moolink {

// "1.25 s", "0.3 ms": three digits, for people.
std::string in_seconds(Duration duration);
std::string in_milliseconds(Duration duration);

}  // namespace moolink
