#pragma once

// CUDA devices: copies between their memory and the host's, in the order of the frameworks'
// streams.
//
// A process's CUDA state (the driver's, a primary context for each device) is its own, shared with
// its frameworks; so are these objects. They are never destroyed: the driver may have ended before
// them when a process ends.

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/at_fork.h"
#include "base/descriptor.h"
#include "base/uid.h"
#include "device/driver.h"
#include "device/staging.h"
#include "tensor/layout.h"

namespace moolink::device {

// Whether the CUDA driver can read the memory: a device's own, managed, or pinned host memory.
bool is_cuda(const tensor::Device& device);
// Whether it is a device's own.
bool is_on_device(const tensor::Device& device);

struct Transfer {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
};

// Of copies since the process began; the pinned bytes are those of now.
struct Counters {
  std::uint64_t bytes_to_host = 0;
  std::uint64_t bytes_to_device = 0;
  std::uint64_t copies_to_host = 0;  // waits for a device, each for one or more transfers
  std::uint64_t copies_to_device = 0;
  std::uint64_t pinned_bytes = 0;
  std::uint64_t bytes_within_device = 0;  // captured in a device's own memory
};

// Memory of a device, mapped into this process.
struct DeviceMemory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  MemoryHandle handle = 0;  // 0: other processes cannot map it
};

class Devices;

std::string device_text(int device);  // "cuda:0"

// A copy stream of a device, owned by its holder. Members may be called on any thread; they need no
// GIL and block without it. They throw Exception{error}, which names the device and CUDA's error.
class Stream {
 public:
  Stream(Devices& devices, int device, StreamHandle handle)
      : devices_(devices), device_(device), handle_(handle) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();

  int device() const { return device_; }
  // For DLPack's exporters, which make this stream wait for theirs.
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(handle_); }
  // Work queued on the framework's stream now precedes work queued here from now on. Null: the
  // legacy default stream.
  void follow(void* producer);

  // They return once the bytes are there.
  void copy_to_host(std::span<const Transfer> transfers) { copy(transfers, true); }
  void copy_to_device(std::span<const Transfer> transfers) { copy(transfers, false); }
  void copy_within_device(std::span<const Transfer> transfers);

 private:
  void copy(std::span<const Transfer> transfers, bool to_host);

  Devices& devices_;
  const int device_;
  const StreamHandle handle_;
};

class Devices {
 public:
  // share: whether processes of this machine may map one another's device memory.
  explicit Devices(const Driver& driver, StagingOptions staging = {}, bool share = false);
  Devices(const Devices&) = delete;
  Devices& operator=(const Devices&) = delete;

  // The machine's devices, initialised at the first need. Throws Exception{error} if there is no
  // driver, no device, or this process was forked from one that uses them.
  static Devices& process();
  // Null before a successful call of process().
  static Devices* process_if_used();

  int count() const { return count_; }
  Counters counters() const;

  // The stream that this thread holds on the device, or an idle one.
  std::shared_ptr<Stream> stream(int device);

  // --- memory of a device, in whole pages (Block); device_memory.cc. Errors are Exception{error}.
  DeviceMemory allocate(int device, std::size_t bytes);
  void free(int device, const DeviceMemory& memory) noexcept;
  Descriptor export_dmabuf(int device, const DeviceMemory& memory);
  // For other processes of this machine, which map it; it stays while one of them does. Only for
  // memory with a handle.
  Descriptor export_to_processes(int device, const DeviceMemory& memory);
  DeviceMemory map(int device, const Descriptor& exported, std::size_t bytes);

  // Why processes cannot share this device's memory; empty: they can. Tried by the first call, and
  // again, a few times, if that has failed.
  std::string sharing_refusal(int device);
  // Whether they can, as far as that has been tried.
  bool shares(int device);
  // Sharing has failed: it is not tried again.
  void refuse_sharing(int device, const std::string& reason);
  // Identifies a device in every process of the machine.
  Uid uid(int device);
  std::optional<int> find(const Uid& uid);  // of those that receive
  // Arrays are received on this device: peers may lend its memory from now on. Returns why they
  // cannot, if they are wanted to.
  std::string receives(int device);
  // The devices of which this was said, as bits.
  std::uint64_t receiving() const { return receiving_.load(std::memory_order_relaxed); }

 private:
  friend class Stream;

  struct Device {
    ContextHandle context = nullptr;
    std::vector<StreamHandle> idle_streams;
    std::vector<EventHandle> idle_events;
    std::optional<std::string> sharing_refusal;
    int failed_trials = 0;
  };
  // Makes a device's context the thread's while it lives. Throws Exception{error}.
  struct Current {
    Current(Devices& devices, int device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

    const Driver& driver;
  };
  class Event;
  class Pipeline;

  void check(Status status, int device, const char* what) const;
  void check_process() const;    // that it is not a forked child
  int number(int device) const;  // the driver's
  ContextHandle context(int device);
  void try_sharing(int device);
  DeviceMemory create(int device, std::size_t bytes);
  DeviceMemory place(int device, MemoryHandle handle, std::size_t bytes);
  // A stream or an event of the device, made by `create` if none is idle; with its context current.
  template <class Handle, class Create>
  Handle take(int device, std::vector<Handle> Device::* idle, const char* what, Create&& create);
  template <class Handle>
  void give_back(int device, std::vector<Handle> Device::* idle, Handle handle);

  const Driver& driver_;
  const pid_t pid_;
  const bool share_;
  int count_ = 0;
  Staging staging_;
  mutable std::mutex mutex_;
  HeldOverForks over_forks_{mutex_};
  std::vector<Device> devices_;
  Counters counters_;  // without the pinned bytes
  std::atomic<std::uint64_t> receiving_{0};
};

}  // namespace moolink::device
