#pragma once

// The functions of libibverbs that moolink calls. Types come from its header, so that the layout of
// its structs is the library's own; the functions are looked up at run time, so that one build
// serves machines with and without RDMA.

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

// Macros of the header over functions of the library.
#undef ibv_reg_mr
#undef ibv_query_port

namespace moolink::transport::verbs {

// All of its bytes are 0, as the library requires for unused fields; some of its enums have no such
// value.
template <class Struct>
Struct zeroed() {
  Struct value;
  std::memset(&value, 0, sizeof value);
  return value;
}

// result, member (the symbol is ibv_member), arguments
#define MOOLINK_VERBS_FUNCTIONS(X)                                                         \
  X(ibv_device**, get_device_list, (int* count))                                           \
  X(void, free_device_list, (ibv_device * *list))                                          \
  X(const char*, get_device_name, (ibv_device * device))                                   \
  X(ibv_context*, open_device, (ibv_device * device))                                      \
  X(int, close_device, (ibv_context * context))                                            \
  X(int, query_device, (ibv_context * context, ibv_device_attr * attributes))              \
  X(int, query_gid, (ibv_context * context, std::uint8_t port, int index, ibv_gid* gid))   \
  X(ibv_pd*, alloc_pd, (ibv_context * context))                                            \
  X(int, dealloc_pd, (ibv_pd * domain))                                                    \
  X(ibv_mr*, reg_mr, (ibv_pd * domain, void* address, std::size_t bytes, int access))      \
  X(int, dereg_mr, (ibv_mr * region))                                                      \
  X(ibv_comp_channel*, create_comp_channel, (ibv_context * context))                       \
  X(int, destroy_comp_channel, (ibv_comp_channel * channel))                               \
  X(ibv_cq*, create_cq,                                                                    \
    (ibv_context * context, int entries, void* of, ibv_comp_channel* channel, int vector)) \
  X(int, destroy_cq, (ibv_cq * queue))                                                     \
  X(int, get_cq_event, (ibv_comp_channel * channel, ibv_cq * *queue, void** of))           \
  X(void, ack_cq_events, (ibv_cq * queue, unsigned count))                                 \
  X(ibv_srq*, create_srq, (ibv_pd * domain, ibv_srq_init_attr * attributes))               \
  X(int, destroy_srq, (ibv_srq * queue))                                                   \
  X(ibv_qp*, create_qp, (ibv_pd * domain, ibv_qp_init_attr * attributes))                  \
  X(int, modify_qp, (ibv_qp * pair, ibv_qp_attr * attributes, int which))                  \
  X(int, destroy_qp, (ibv_qp * pair))                                                      \
  X(int, get_async_event, (ibv_context * context, ibv_async_event * event))                \
  X(void, ack_async_event, (ibv_async_event * event))                                      \
  X(const char*, event_type_str, (ibv_event_type type))                                    \
  X(const char*, wc_status_str, (ibv_wc_status status))                                    \
  X(int, fork_init, ())

struct Library {
// NOLINTBEGIN(bugprone-macro-parentheses): these are parts of a declarator
#define MOOLINK_VERBS_MEMBER(result, member, arguments) result(*member) arguments = nullptr;
  MOOLINK_VERBS_FUNCTIONS(MOOLINK_VERBS_MEMBER)
#undef MOOLINK_VERBS_MEMBER
  // NOLINTEND(bugprone-macro-parentheses)

  // Null: the library is too old for other devices' memory.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                           std::uint64_t address, int dmabuf, int access) = nullptr;

  // Not functions of the library but members of an opened device, behind the same table, so that
  // tests can replace them too.
  int (*query_port)(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) = nullptr;
  int (*post_send)(ibv_qp* pair, ibv_send_wr* first, ibv_send_wr** bad) = nullptr;
  int (*post_srq_recv)(ibv_srq* queue, ibv_recv_wr* first, ibv_recv_wr** bad) = nullptr;
  int (*poll_cq)(ibv_cq* queue, int most, ibv_wc* into) = nullptr;
  int (*req_notify_cq)(ibv_cq* queue, int solicited_only) = nullptr;
};

struct LoadedLibrary {
  const Library* functions = nullptr;  // null: it cannot be used
  std::string file;
  std::string reason;  // why not
};

// Loads the library at the first call; it stays loaded for ever.
const LoadedLibrary& load_library();

}  // namespace moolink::transport::verbs
