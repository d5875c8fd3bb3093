#pragma once

// The functions of the CUDA driver that moolink calls. They are declared by hand: handles are
// opaque and the rest are numbers, so that every machine can build moolink, and one without a
// driver can run it.

#include <cstddef>
#include <cstdint>
#include <string>

namespace moolink::device {

using Status = int;  // CUresult
using ContextHandle = struct CudaContext*;
using StreamHandle = struct CudaStream*;
using EventHandle = struct CudaEvent*;
using Address = unsigned long long;       // CUdeviceptr: of a device's memory or of the host's
using MemoryHandle = unsigned long long;  // CUmemGenericAllocationHandle: memory without an address

inline Address address(const std::byte* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

inline constexpr Status kSuccess = 0;
inline constexpr Status kNotReady = 600;
inline constexpr unsigned kStreamNonBlocking = 1;  // does not wait for the legacy stream
inline constexpr unsigned kEventBlockingSync = 1;  // a waiting thread sleeps
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;  // pinned for every context
inline constexpr int kRangeDmaBuf = 1;             // CUmemRangeHandleType: the handle is an int
inline constexpr int kHandleDescriptor = 1;        // CUmemAllocationHandleType: a file descriptor
inline constexpr int kPinned = 1;                  // CUmemAllocationType
inline constexpr int kLocationDevice = 1;          // CUmemLocationType
inline constexpr int kReadWrite = 3;               // CUmemAccess_flags
inline constexpr int kSharesDescriptors = 103;     // CUdevice_attribute
inline constexpr int kRdmaReadsMapped = 110;       // CUdevice_attribute

struct DeviceUuid {  // CUuuid
  char bytes[16];
};

struct MemoryLocation {  // CUmemLocation
  int type = kLocationDevice;
  int device = 0;
};

struct MemoryProperties {  // CUmemAllocationProp
  int type = kPinned;
  int handle_types = kHandleDescriptor;
  MemoryLocation location;
  void* unused_on_linux = nullptr;
  unsigned char compression = 0;
  unsigned char rdma_reads = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};

struct MemoryAccess {  // CUmemAccessDesc
  MemoryLocation location;
  int rights = kReadWrite;
};

// member, exported symbol, arguments. If the driver's header has two versions of a function under
// one name, the symbol is the second's.
#define MOOLINK_CUDA_FUNCTIONS(X)                                                            \
  X(init, cuInit, (unsigned flags))                                                          \
  X(device_count, cuDeviceGetCount, (int* count))                                            \
  X(device_get, cuDeviceGet, (int* device, int ordinal))                                     \
  X(primary_context_retain, cuDevicePrimaryCtxRetain, (ContextHandle * context, int device)) \
  X(context_push, cuCtxPushCurrent_v2, (ContextHandle context))                              \
  X(context_pop, cuCtxPopCurrent_v2, (ContextHandle * context))                              \
  X(stream_create, cuStreamCreate, (StreamHandle * stream, unsigned flags))                  \
  X(stream_wait_event, cuStreamWaitEvent,                                                    \
    (StreamHandle stream, EventHandle event, unsigned flags))                                \
  X(stream_synchronize, cuStreamSynchronize, (StreamHandle stream))                          \
  X(event_create, cuEventCreate, (EventHandle * event, unsigned flags))                      \
  X(event_record, cuEventRecord, (EventHandle event, StreamHandle stream))                   \
  X(event_query, cuEventQuery, (EventHandle event))                                          \
  X(event_synchronize, cuEventSynchronize, (EventHandle event))                              \
  X(copy, cuMemcpyAsync, (Address to, Address from, std::size_t bytes, StreamHandle stream)) \
  X(host_allocate, cuMemHostAlloc, (void** memory, std::size_t bytes, unsigned flags))       \
  X(allocate, cuMemAlloc_v2, (Address * memory, std::size_t bytes))                          \
  X(free, cuMemFree_v2, (Address memory))                                                    \
  X(error_name, cuGetErrorName, (Status status, const char** text))                          \
  X(error_text, cuGetErrorString, (Status status, const char** text))

// Null if the driver is older than they are.
#define MOOLINK_CUDA_LATER_FUNCTIONS(X)                                                    \
  X(range_handle, cuMemGetHandleForAddressRange,                                           \
    (void* handle, Address memory, std::size_t bytes, int type, unsigned long long flags)) \
  X(device_uuid, cuDeviceGetUuid_v2, (DeviceUuid * uuid, int device))                      \
  X(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, int device))       \
  X(memory_create, cuMemCreate,                                                            \
    (MemoryHandle * handle, std::size_t bytes, const MemoryProperties* properties,         \
     unsigned long long flags))                                                            \
  X(memory_release, cuMemRelease, (MemoryHandle handle))                                   \
  X(memory_export, cuMemExportToShareableHandle,                                           \
    (void* descriptor, MemoryHandle handle, int type, unsigned long long flags))           \
  X(memory_import, cuMemImportFromShareableHandle,                                         \
    (MemoryHandle * handle, void* descriptor, int type))                                   \
  X(address_reserve, cuMemAddressReserve,                                                  \
    (Address * address, std::size_t bytes, std::size_t alignment, Address wanted,          \
     unsigned long long flags))                                                            \
  X(address_free, cuMemAddressFree, (Address address, std::size_t bytes))                  \
  X(map, cuMemMap,                                                                         \
    (Address address, std::size_t bytes, std::size_t offset, MemoryHandle handle,          \
     unsigned long long flags))                                                            \
  X(unmap, cuMemUnmap, (Address address, std::size_t bytes))                               \
  X(set_access, cuMemSetAccess,                                                            \
    (Address address, std::size_t bytes, const MemoryAccess* access, std::size_t count))

struct Driver {
// NOLINTNEXTLINE(bugprone-macro-parentheses): these are parts of a declarator
#define MOOLINK_CUDA_MEMBER(member, symbol, arguments) Status(*member) arguments = nullptr;
  MOOLINK_CUDA_FUNCTIONS(MOOLINK_CUDA_MEMBER)
  MOOLINK_CUDA_LATER_FUNCTIONS(MOOLINK_CUDA_MEMBER)
#undef MOOLINK_CUDA_MEMBER
};

// The machine's driver, loaded by the first call and not initialised. Throws Exception{error} if
// there is none, or it lacks a function.
const Driver& load_driver();

// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
std::string describe(const Driver& driver, Status status);

}  // namespace moolink::device
