#pragma once

#include <functional>
#include <string_view>

namespace moolink {

// The numbers of Python's logging, so that bind passes them on unchanged.
enum class LogLevel : int { debug = 10, info = 20, warning = 30, error = 40 };

// Called from any thread, never with the engine's lock held for long; must not block.
using LogSink = std::function<void(LogLevel, std::string_view message)>;

}  // namespace moolink
