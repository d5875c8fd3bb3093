#pragma once

#include <cstdint>
#include <string>

#include "base/time.h"

namespace moolink {

// "1.25 s", "0.3 ms": three digits, for people.
std::string in_seconds(Duration duration);
std::string in_milliseconds(Duration duration);
// "1,000,000", for people.
std::string grouped(std::int64_t number);

}  // namespace moolink
