#pragma once

#include <string>

#include "device/devices.h"

namespace moolink::device {

inline std::string device_text(int device) { return "cuda:" + std::to_string(device); }

// Makes a device's context the thread's while it lives. Throws Exception{error}.
class Devices::Current {
 public:
  Current(Devices& devices, int device) : devices_(devices) {
    devices.check(devices.driver_.context_push(devices.context(device)), device,
                  "making its context current");
  }
  ~Current() {
    ContextHandle popped = nullptr;
    devices_.driver_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Devices& devices_;
};

}  // namespace moolink::device
