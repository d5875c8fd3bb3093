#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace moolink {

// For a system call that has failed, with errno.
[[noreturn]] inline void throw_system_error(const std::string& what) {
  throw Exception(ErrorCode::error, what + ": " + std::strerror(errno));
}

}  // namespace moolink
