#include "device/driver.h"

#include <dlfcn.h>

#include <mutex>

#include "base/error.h"

namespace moolink::device {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

[[noreturn]] void fail(const std::string& reason) {
  throw Exception(ErrorCode::error,
                  "the CUDA driver cannot be used: " + reason +
                      "; tensors on a CUDA device need NVIDIA's driver, and a container that is "
                      "given the device (see `moolink doctor`)");
}

template <class Function>
void find(void* library, const char* symbol, Function& function) {
  void* found = dlsym(library, symbol);
  if (found == nullptr) fail(std::string(kLibrary) + " has no " + symbol + " (it is too old)");
  function = reinterpret_cast<Function>(found);
}

Driver load() {
  // The library that a framework has loaded, if there is one; it stays loaded for ever.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    fail(reason == nullptr ? kLibrary : reason);
  }
  Driver driver;
#define MOOLINK_CUDA_FIND(member, symbol, arguments) find(library, #symbol, driver.member);
  MOOLINK_CUDA_FUNCTIONS(MOOLINK_CUDA_FIND)
#undef MOOLINK_CUDA_FIND
#define MOOLINK_CUDA_LOOK(member, symbol, arguments) \
  driver.member = reinterpret_cast<decltype(driver.member)>(dlsym(library, #symbol));
  MOOLINK_CUDA_LATER_FUNCTIONS(MOOLINK_CUDA_LOOK)
#undef MOOLINK_CUDA_LOOK
  return driver;
}

}  // namespace

const Driver& load_driver() {
  // Initialised by the first call that finds a driver: a failed one is repeated.
  static const Driver driver = load();
  return driver;
}

std::string describe(const Driver& driver, Status status) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.error_name(status, &name) != kSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(status);
  }
  if (driver.error_text(status, &text) != kSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

}  // namespace moolink::device
