#pragma once

#include <functional>
#include <thread>

namespace moolink::io {

// A thread that gets only the signals of its own faults: the others are for the threads of the
// application. Throws std::system_error when the process may have no more threads.
std::thread quiet_thread(std::function<void()> body);

}  // namespace moolink::io
