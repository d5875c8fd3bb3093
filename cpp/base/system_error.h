#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace moolink {

// The system's text for an error number, and the remedy for a limit of this process.
inline std::string system_error_text(int error) {
  std::string text = std::strerror(error);
  if (error == EMFILE) text += "; allow this process more of them (see ulimit -n)";
  return text;
}

// For a system call that has failed, with errno.
[[noreturn]] inline void throw_system_error(const std::string& what) {
  throw Exception(ErrorCode::error, what + ": " + system_error_text(errno));
}

}  // namespace moolink
