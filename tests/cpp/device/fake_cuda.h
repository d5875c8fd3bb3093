#pragma once

// The fake driver (fake_driver.h) as this process's own CUDA driver.

#include <dlfcn.h>

#include <cstdlib>

#include "base/buffer.h"
#include "check.h"
#include "device/block.h"
#include "device/devices.h"

namespace moolink::device::fake {

inline void* library() {
  void* handle = ::dlopen(MOOLINK_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  CHECK(handle != nullptr);
  return handle;
}

inline Devices& load() {
  library();
  setenv("MOOLINK_CUDA_IPC", "1", 1);
  return Devices::process();
}

// The next calls of the driver's function fail.
inline void fail_next(const char* function, Status status, int times) {
  void* found = ::dlsym(library(), "fake_cuda_fail_next");
  reinterpret_cast<void (*)(const char*, Status, int)>(found)(function, status, times);
}

// The same bytes in memory of a device.
inline Buffer on_device(const Buffer& bytes, int device) {
  Devices& devices = load();
  const MutableBuffer memory = allocate(devices, device, bytes.size());
  const Transfer transfer{bytes.data(), memory.data(), bytes.size()};
  devices.stream(device)->copy_to_device({&transfer, 1});
  return memory;
}

}  // namespace moolink::device::fake
