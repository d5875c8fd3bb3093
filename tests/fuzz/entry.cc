// What libFuzzer calls.

#include "target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moolink::fuzz::run({data, size});
  return 0;
}
