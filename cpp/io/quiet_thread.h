#pragma once

#include <functional>
#include <thread>

namespace moolink::io {

// A thread that gets only the signals of its own faults: the others are for the threads of the
// application. The name, of at most 15 characters, is shown by ps and top. Throws
// std::system_error when the process may have no more threads.
std::thread quiet_thread(const char* name, std::function<void()> body);

}  // namespace moolink::io
