#include "fake_driver.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moolink::device {

struct CudaContext {
  int device;
};
// A place in a stream, and whether the stream has come to it.
struct Mark {
  CudaStream* stream = nullptr;
  bool reached = true;
};
struct CudaEvent {
  // Of the last recording: who waits goes on waiting for the one there was when the wait began.
  std::shared_ptr<Mark> mark = std::make_shared<Mark>();
};
struct CudaStream {
  std::deque<std::function<void()>> work;
};

namespace fake {
namespace {

constexpr Status kInvalidValue = 1;
constexpr Status kNoMemory = 2;
constexpr Status kInvalidContext = 201;
constexpr std::size_t kGranularity = std::size_t{2} << 20;

// A device's memory has an address that the processor cannot read, and another one for the driver's
// own copies.
struct Allocation {
  std::byte* readable = nullptr;
  std::size_t bytes = 0;
  int descriptor = -1;
  bool accessible = true;  // to the device
};

// Memory of a handle: a file that processes can share.
struct Created {
  int descriptor = -1;
  std::size_t bytes = 0;
};

struct State {
  std::recursive_mutex mutex;
  CudaContext contexts[kDevices] = {{0}, {1}};
  CudaStream legacy;
  std::vector<std::unique_ptr<CudaStream>> streams;
  std::vector<std::unique_ptr<CudaEvent>> events;
  std::map<void*, std::size_t> pinned;
  std::map<std::byte*, Allocation> memory;  // of devices
  std::map<MemoryHandle, Created> created;
  MemoryHandle last_handle = 0;
  std::map<std::string, int> calls;
  std::map<std::string, std::pair<Status, int>> failures;
};

State& state() {
  static State& one = *new State();
  return one;
}

thread_local std::vector<CudaContext*> current;

CudaStream& stream_of(CudaStream* stream) { return stream == nullptr ? state().legacy : *stream; }

// Runs the stream until it has come to the mark.
void run_until(const Mark& mark) {
  while (!mark.reached) {
    auto& work = stream_of(mark.stream).work;
    const auto next = std::move(work.front());
    work.pop_front();
    next();
  }
}

// The allocation that the address lies in, if there is one.
auto allocation_of(Address address) {
  auto& memory = state().memory;
  auto* at = reinterpret_cast<std::byte*>(address);
  auto found = memory.upper_bound(at);
  if (found == memory.begin()) return memory.end();
  --found;
  return at < found->first + found->second.bytes ? found : memory.end();
}

void* readable(Address address) {
  const auto found = allocation_of(address);
  auto* at = reinterpret_cast<std::byte*>(address);
  if (found == state().memory.end()) return at;
  if (!found->second.accessible) std::abort();
  return found->second.readable + (at - found->first);
}

void run_all(CudaStream& stream) {
  while (!stream.work.empty()) {
    const auto next = std::move(stream.work.front());
    stream.work.pop_front();
    next();
  }
}

class Call {
 public:
  explicit Call(const char* function) : lock_(state().mutex) {
    ++state().calls[function];
    auto& [status, times] = state().failures[function];
    if (times > 0) {
      --times;
      failure_ = status;
    }
  }
  // Success, unless the call is to fail.
  template <class Body>
  Status operator()(Body&& body) {
    return failure_ != kSuccess ? failure_ : body();
  }
  template <class Body>
  Status in_context(Body&& body) {
    if (failure_ != kSuccess) return failure_;
    return current.empty() ? kInvalidContext : body();
  }

 private:
  std::lock_guard<std::recursive_mutex> lock_;
  Status failure_ = kSuccess;
};

}  // namespace

StreamHandle new_stream() {
  const std::lock_guard lock(state().mutex);
  return state().streams.emplace_back(std::make_unique<CudaStream>()).get();
}

void enqueue(StreamHandle stream, std::function<void()> work) {
  const std::lock_guard lock(state().mutex);
  stream_of(stream).work.push_back(std::move(work));
}

void fail_next(const char* function, Status status, int times) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = {status, times};
}

int calls(const char* function) {
  const std::lock_guard lock(state().mutex);
  return state().calls[function];
}

std::size_t pinned_bytes() {
  const std::lock_guard lock(state().mutex);
  std::size_t bytes = 0;
  for (const auto& [memory, size] : state().pinned) bytes += size;
  return bytes;
}

}  // namespace fake
}  // namespace moolink::device

using namespace moolink::device;        // NOLINT: the driver's functions have no namespace
using namespace moolink::device::fake;  // NOLINT

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED Status cuInit(unsigned) {
  return Call("init")([] { return kSuccess; });
}
EXPORTED Status cuDriverGetVersion(int* version) {
  return Call("driver_version")([&] { return *version = 13000, kSuccess; });
}
EXPORTED Status cuDeviceGetCount(int* count) {
  return Call("device_count")([&] { return *count = kDevices, kSuccess; });
}
EXPORTED Status cuDeviceGet(int* device, int ordinal) {
  return Call("device_get")([&] { return *device = 100 + ordinal, kSuccess; });
}
EXPORTED Status cuDeviceGetName(char* name, int size, int device) {
  return Call("device_name")([&] {
    std::snprintf(name, static_cast<std::size_t>(size), "Fake %d", device - 100);
    return kSuccess;
  });
}
EXPORTED Status cuDevicePrimaryCtxRetain(ContextHandle* context, int device) {
  return Call("primary_context_retain")([&] {
    *context = &state().contexts[device - 100];
    return kSuccess;
  });
}
EXPORTED Status cuCtxPushCurrent_v2(ContextHandle context) {
  return Call("context_push")([&] {
    current.push_back(context);
    return kSuccess;
  });
}
EXPORTED Status cuCtxPopCurrent_v2(ContextHandle* context) {
  return Call("context_pop").in_context([&] {
    *context = current.back();
    current.pop_back();
    return kSuccess;
  });
}
EXPORTED Status cuStreamCreate(StreamHandle* stream, unsigned flags) {
  return Call("stream_create").in_context([&] {
    *stream = new_stream();
    return flags == kStreamNonBlocking ? kSuccess : kInvalidValue;
  });
}
EXPORTED Status cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned) {
  return Call("stream_wait_event").in_context([&] {
    enqueue(stream, [mark = event->mark] { run_until(*mark); });
    return kSuccess;
  });
}
EXPORTED Status cuStreamSynchronize(StreamHandle stream) {
  return Call("stream_synchronize").in_context([&] {
    run_all(stream_of(stream));
    return kSuccess;
  });
}
EXPORTED Status cuEventCreate(EventHandle* event, unsigned) {
  return Call("event_create").in_context([&] {
    *event = state().events.emplace_back(std::make_unique<CudaEvent>()).get();
    return kSuccess;
  });
}
EXPORTED Status cuEventRecord(EventHandle event, StreamHandle stream) {
  return Call("event_record").in_context([&] {
    event->mark = std::make_shared<Mark>(Mark{stream, false});
    enqueue(stream, [mark = event->mark] { mark->reached = true; });
    return kSuccess;
  });
}
EXPORTED Status cuEventQuery(EventHandle event) {
  return Call("event_query").in_context([&] {
    return event->mark->reached ? kSuccess : kNotReady;
  });
}
EXPORTED Status cuEventSynchronize(EventHandle event) {
  return Call("event_synchronize").in_context([&] {
    run_until(*event->mark);
    return kSuccess;
  });
}
EXPORTED Status cuMemcpyAsync(Address to, Address from, std::size_t bytes, StreamHandle stream) {
  return Call("copy").in_context([&] {
    enqueue(stream, [to, from, bytes] { std::memcpy(readable(to), readable(from), bytes); });
    return kSuccess;
  });
}
EXPORTED Status cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return Call("host_allocate").in_context([&] {
    *memory = std::aligned_alloc(4096, bytes);
    if (*memory == nullptr) return kNoMemory;
    state().pinned[*memory] = bytes;
    return kSuccess;
  });
}
EXPORTED Status cuMemFreeHost(void* memory) {
  return Call("host_free").in_context([&] {
    state().pinned.erase(memory);
    std::free(memory);
    return kSuccess;
  });
}
EXPORTED Status cuMemAlloc_v2(Address* memory, std::size_t bytes) {
  return Call("allocate").in_context([&] {
    Allocation made{nullptr, bytes, memfd_create("memory of a fake device", MFD_CLOEXEC)};
    if (ftruncate(made.descriptor, static_cast<off_t>(bytes)) != 0) return kNoMemory;
    const auto map = [&](int rights) {
      return static_cast<std::byte*>(mmap(nullptr, bytes, rights, MAP_SHARED, made.descriptor, 0));
    };
    made.readable = map(PROT_READ | PROT_WRITE);
    std::byte* address = map(PROT_NONE);
    state().memory[address] = made;
    *memory = reinterpret_cast<std::uintptr_t>(address);
    return kSuccess;
  });
}
EXPORTED Status cuMemFree_v2(Address memory) {
  return Call("free").in_context([&] {
    const auto found = allocation_of(memory);
    if (found == state().memory.end()) return kInvalidValue;
    const Allocation& freed = found->second;
    munmap(found->first, freed.bytes);
    munmap(freed.readable, freed.bytes);
    close(freed.descriptor);
    state().memory.erase(found);
    return kSuccess;
  });
}
EXPORTED Status cuMemGetHandleForAddressRange(void* handle, Address memory, std::size_t bytes,
                                              int type, unsigned long long) {
  return Call("range_handle").in_context([&] {
    const auto found = allocation_of(memory);
    const bool whole = found != state().memory.end() && found->second.bytes == bytes;
    if (!whole || type != kRangeDmaBuf) return kInvalidValue;
    *static_cast<int*>(handle) = dup(found->second.descriptor);
    return kSuccess;
  });
}
EXPORTED Status cuDeviceGetUuid_v2(DeviceUuid* uuid, int device) {
  return Call("device_uuid")([&] {
    std::memset(uuid->bytes, device, sizeof uuid->bytes);
    return kSuccess;
  });
}
EXPORTED Status cuDeviceGetAttribute(int* value, int attribute, int) {
  return Call("device_attribute")([&] {
    *value = attribute == kSharesDescriptors ? 1 : 0;
    return kSuccess;
  });
}
EXPORTED Status cuMemCreate(MemoryHandle* handle, std::size_t bytes,
                            const MemoryProperties* properties, unsigned long long) {
  return Call("memory_create").in_context([&] {
    const bool known = properties->handle_types == kHandleDescriptor &&
                       properties->location.device >= 100 && bytes % kGranularity == 0;
    if (!known) return kInvalidValue;
    const int descriptor = memfd_create("shared memory of a fake device", MFD_CLOEXEC);
    if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) return kNoMemory;
    *handle = ++state().last_handle;
    state().created[*handle] = {descriptor, bytes};
    return kSuccess;
  });
}
EXPORTED Status cuMemRelease(MemoryHandle handle) {
  return Call("memory_release")([&] {
    const auto node = state().created.extract(handle);
    if (node.empty()) return kInvalidValue;
    close(node.mapped().descriptor);
    return kSuccess;
  });
}
EXPORTED Status cuMemExportToShareableHandle(void* descriptor, MemoryHandle handle, int type,
                                             unsigned long long) {
  return Call("memory_export").in_context([&] {
    const auto found = state().created.find(handle);
    if (found == state().created.end() || type != kHandleDescriptor) return kInvalidValue;
    *static_cast<int*>(descriptor) = dup(found->second.descriptor);
    return kSuccess;
  });
}
EXPORTED Status cuMemImportFromShareableHandle(MemoryHandle* handle, void* descriptor, int type) {
  return Call("memory_import").in_context([&] {
    const int own = dup(static_cast<int>(reinterpret_cast<std::uintptr_t>(descriptor)));
    struct stat status{};
    if (own < 0 || fstat(own, &status) != 0 || type != kHandleDescriptor) return kInvalidValue;
    *handle = ++state().last_handle;
    state().created[*handle] = {own, static_cast<std::size_t>(status.st_size)};
    return kSuccess;
  });
}
EXPORTED Status cuMemAddressReserve(Address* address, std::size_t bytes, std::size_t, Address,
                                    unsigned long long) {
  return Call("address_reserve").in_context([&] {
    void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) return kNoMemory;
    *address = reinterpret_cast<std::uintptr_t>(reserved);
    return kSuccess;
  });
}
EXPORTED Status cuMemAddressFree(Address address, std::size_t bytes) {
  return Call("address_free")([&] {
    if (allocation_of(address) != state().memory.end()) return kInvalidValue;  // still mapped
    return munmap(reinterpret_cast<void*>(address), bytes) == 0 ? kSuccess : kInvalidValue;
  });
}
EXPORTED Status cuMemMap(Address address, std::size_t bytes, std::size_t offset,
                         MemoryHandle handle, unsigned long long) {
  return Call("map").in_context([&] {
    const auto found = state().created.find(handle);
    if (found == state().created.end() || offset != 0 || bytes > found->second.bytes) {
      return kInvalidValue;
    }
    Allocation mapped{nullptr, bytes, dup(found->second.descriptor), false};
    mapped.readable = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, found->second.descriptor, 0));
    state().memory[reinterpret_cast<std::byte*>(address)] = mapped;
    return kSuccess;
  });
}
EXPORTED Status cuMemUnmap(Address address, std::size_t bytes) {
  return Call("unmap")([&] {
    const auto found = allocation_of(address);
    if (found == state().memory.end() || found->second.bytes != bytes) return kInvalidValue;
    munmap(found->second.readable, bytes);
    close(found->second.descriptor);
    state().memory.erase(found);
    return kSuccess;
  });
}
EXPORTED Status cuMemSetAccess(Address address, std::size_t bytes, const MemoryAccess* access,
                               std::size_t count) {
  return Call("set_access").in_context([&] {
    const auto found = allocation_of(address);
    const bool known = found != state().memory.end() && found->second.bytes == bytes &&
                       count == 1 && access->rights == kReadWrite;
    if (!known) return kInvalidValue;
    found->second.accessible = true;
    return kSuccess;
  });
}
// fail_next() for who has loaded this as a library.
EXPORTED void fake_cuda_fail_next(const char* function, Status status, int times) {
  fail_next(function, status, times);
}
EXPORTED Status cuGetErrorName(Status status, const char** text) {
  *text = status == kNoMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return *text == nullptr ? kInvalidValue : kSuccess;
}
EXPORTED Status cuGetErrorString(Status, const char** text) {
  *text = "out of memory";
  return kSuccess;
}

namespace moolink::device::fake {

Driver driver() {
  Driver table;
#define MOOLINK_CUDA_FAKE(member, symbol, arguments) table.member = &::symbol;
  MOOLINK_CUDA_FUNCTIONS(MOOLINK_CUDA_FAKE)
  MOOLINK_CUDA_LATER_FUNCTIONS(MOOLINK_CUDA_FAKE)
#undef MOOLINK_CUDA_FAKE
  return table;
}

}  // namespace moolink::device::fake
