#include "transport/verbs/library.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstddef>

namespace moolink::transport::verbs {
namespace {

constexpr const char* kLibrary = "libibverbs.so.1";

template <class Function>
void find(void* library, const char* symbol, Function& function, std::string& missing) {
  void* found = dlsym(library, symbol);
  if (found == nullptr && missing.empty()) missing = symbol;
  function = reinterpret_cast<Function>(found);
}

// The library's own function of this name fills in an older, shorter struct.
int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) {
  *attributes = zeroed<ibv_port_attr>();
  // Like the header's macro verbs_get_ctx_op, which is not standard C++: new functions are placed
  // before the older ones.
  constexpr std::size_t kLeast = sizeof(verbs_context) - offsetof(verbs_context, query_port);
  verbs_context* extended = verbs_get_ctx(context);
  if (extended == nullptr || extended->sz < kLeast || extended->query_port == nullptr) {
    return ENOSYS;
  }
  return extended->query_port(context, port, attributes, sizeof *attributes);
}

std::string file_of(const Library& library) {
  Dl_info info{};
  const auto* address = reinterpret_cast<const void*>(library.open_device);
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return kLibrary;
  return info.dli_fname;
}

LoadedLibrary load() {
  LoadedLibrary loaded;
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* text = dlerror();
    loaded.reason = std::string(text == nullptr ? kLibrary : text) + " (Debian: libibverbs1)";
    return loaded;
  }
  auto table = Library{};
  std::string missing;
#define MOOLINK_VERBS_FIND(result, member, arguments) \
  find(handle, "ibv_" #member, table.member, missing);
  MOOLINK_VERBS_FUNCTIONS(MOOLINK_VERBS_FIND)
#undef MOOLINK_VERBS_FIND
  if (!missing.empty()) {
    loaded.reason = std::string(kLibrary) + " has no " + missing + " (it is too old)";
    return loaded;
  }
  table.reg_dmabuf_mr =
      reinterpret_cast<decltype(table.reg_dmabuf_mr)>(dlsym(handle, "ibv_reg_dmabuf_mr"));
  table.query_port = query_port;
  table.post_send = ibv_post_send;
  table.post_srq_recv = ibv_post_srq_recv;
  table.poll_cq = ibv_poll_cq;
  table.req_notify_cq = ibv_req_notify_cq;
  // Kernels before 5.12 would give the child of a fork the pages that a device writes to. The
  // library knows when it is unnecessary; it must precede the first registration.
  table.fork_init();
  loaded.functions = new Library(table);  // for ever, like the library
  loaded.file = file_of(table);
  return loaded;
}

}  // namespace

const LoadedLibrary& load_library() {
  static const LoadedLibrary loaded = load();
  return loaded;
}

}  // namespace moolink::transport::verbs
