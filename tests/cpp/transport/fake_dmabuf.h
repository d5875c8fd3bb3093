#pragma once

// GPUDirect without hardware: in place of ibv_reg_dmabuf_mr, for descriptors that can be mapped
// (device/fake_driver.h).

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "check.h"
#include "transport/verbs/library.h"

namespace moolink::transport::verbs {

inline ibv_mr* register_mapped(ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                               std::uint64_t address, int dmabuf, int access) {
  using RegisterAt = ibv_mr* (*)(ibv_pd*, void*, std::size_t, std::uint64_t, int);
  static const auto register_at = reinterpret_cast<RegisterAt>(
      ::dlsym(::dlopen("libibverbs.so.1", RTLD_NOW), "ibv_reg_mr_iova"));
  CHECK(register_at != nullptr && offset == 0);
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, dmabuf, 0);
  CHECK(mapped != MAP_FAILED);
  ibv_mr* region = register_at(domain, mapped, bytes, address, access);
  ::munmap(mapped, bytes);  // the device holds the pages
  return region;
}

}  // namespace moolink::transport::verbs
