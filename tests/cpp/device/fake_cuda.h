#pragma once

// The fake driver (fake_driver.h) as this process's own CUDA driver.

#include <dlfcn.h>

#include <cstring>

#include "base/buffer.h"
#include "check.h"
#include "device/block.h"
#include "device/devices.h"

namespace moolink::device::fake {

inline Devices& load() {
  CHECK(::dlopen(MOOLINK_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL) != nullptr);
  return Devices::process();
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
