#pragma once

// A CUDA driver without a device: its memory is the host's. What is queued on a stream runs when
// somebody waits for it, and no sooner, so that a copy that is not waited for, or does not wait for
// what comes before it, has wrong bytes.
//
// Memory that is allocated on it cannot be read by the processor: who tries it is killed. Its
// dmabuf is a descriptor that can be mapped.
//
// As a shared library called libcuda.so.1 it serves the tests in Python.

#include <cstddef>
#include <functional>

#include "device/driver.h"

namespace moolink::device::fake {

inline constexpr int kDevices = 2;

Driver driver();

// A stream of a framework, as a producer of tensors has it, and work on it.
StreamHandle new_stream();
void enqueue(StreamHandle stream, std::function<void()> work);

// The next calls of the function of that name (as in the driver's table) fail with `status`.
void fail_next(const char* function, Status status, int times = 1);
// How often the function was called.
int calls(const char* function);
std::size_t pinned_bytes();

}  // namespace moolink::device::fake
