// Memory of a device: of this process, or of another one that has exported it.
//
// Memory to be shared is made by the driver's virtual memory management. Its descriptor counts as a
// reference: the memory stays until the last process has unmapped it, however its maker ends.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "device/devices.h"

namespace moolink::device {
namespace {

constexpr std::size_t kTrialBytes = std::size_t{2} << 20;
constexpr int kMostReceiving = 64;
constexpr int kMostTrials = 3;  // the device may have no memory left for a while

bool knows_sharing(const Driver& driver) {
  return driver.device_uuid != nullptr && driver.device_attribute != nullptr &&
         driver.memory_create != nullptr && driver.memory_release != nullptr &&
         driver.memory_export != nullptr && driver.memory_import != nullptr &&
         driver.address_reserve != nullptr && driver.address_free != nullptr &&
         driver.map != nullptr && driver.unmap != nullptr && driver.set_access != nullptr;
}

}  // namespace

DeviceMemory Devices::allocate(int device, std::size_t bytes) {
  if (sharing_refusal(device).empty()) return create(device, bytes);
  const Current current(*this, device);
  Address memory = 0;
  check(driver_.allocate(&memory, bytes), device, "allocating memory");
  return {std::bit_cast<std::byte*>(memory), bytes};
}

DeviceMemory Devices::create(int device, std::size_t bytes) {
  const Current current(*this, device);
  MemoryProperties properties;
  properties.location.device = number(device);
  int rdma_reads = 0;
  driver_.device_attribute(&rdma_reads, kRdmaReadsMapped, properties.location.device);
  properties.rdma_reads = rdma_reads != 0 ? 1 : 0;
  MemoryHandle handle = 0;
  check(driver_.memory_create(&handle, bytes, &properties, 0), device, "allocating memory");
  return place(device, handle, bytes);
}

// Takes over the handle.
DeviceMemory Devices::place(int device, MemoryHandle handle, std::size_t bytes) {
  MemoryAccess access;
  access.location.device = number(device);
  Address at = 0;
  Status status = driver_.address_reserve(&at, bytes, 0, 0, 0);
  if (status == kSuccess) {
    status = driver_.map(at, bytes, 0, handle, 0);
    if (status == kSuccess) {
      status = driver_.set_access(at, bytes, &access, 1);
      if (status != kSuccess) driver_.unmap(at, bytes);
    }
    if (status != kSuccess) driver_.address_free(at, bytes);
  }
  if (status != kSuccess) driver_.memory_release(handle);
  check(status, device, "mapping memory");
  return {std::bit_cast<std::byte*>(at), bytes, handle};
}

void Devices::free(int device, const DeviceMemory& memory) noexcept {
  if (pid_ != getpid()) return;  // CUDA does not work in a forked child
  try {
    const Current current(*this, device);
    if (memory.handle == 0) {
      driver_.free(address(memory.data));
      return;
    }
    driver_.unmap(address(memory.data), memory.bytes);
    driver_.address_free(address(memory.data), memory.bytes);
    driver_.memory_release(memory.handle);
  } catch (const Exception&) {
    return;  // the driver has ended, and the memory with it
  }
}

Descriptor Devices::export_dmabuf(int device, const DeviceMemory& memory) {
  if (driver_.range_handle == nullptr) {
    throw Exception(ErrorCode::error, "the CUDA driver is too old to share memory of " +
                                          device_text(device) + " (dmabuf: 11.7)");
  }
  const Current current(*this, device);
  int descriptor = -1;
  check(driver_.range_handle(&descriptor, address(memory.data), memory.bytes, kRangeDmaBuf, 0),
        device, "sharing memory with other devices (dmabuf)");
  return Descriptor(descriptor);
}

Descriptor Devices::export_to_processes(int device, const DeviceMemory& memory) {
  const Current current(*this, device);
  int descriptor = -1;
  check(driver_.memory_export(&descriptor, memory.handle, kHandleDescriptor, 0), device,
        "sharing memory with other processes");
  Descriptor exported(descriptor);
  ::fcntl(exported.get(), F_SETFD, FD_CLOEXEC);
  return exported;
}

DeviceMemory Devices::map(int device, const Descriptor& exported, std::size_t bytes) {
  const Current current(*this, device);
  MemoryHandle handle = 0;
  // The descriptor itself stands in the place of a pointer to it.
  void* descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(exported.get()));
  check(driver_.memory_import(&handle, descriptor, kHandleDescriptor), device,
        "importing another process's memory");
  return place(device, handle, bytes);
}

std::string Devices::sharing_refusal(int device) {
  if (!share_) return "MOOLINK_CUDA_IPC is not 1";
  context(device);  // checks the number
  auto& known = devices_[static_cast<std::size_t>(device)].sharing_refusal;
  {
    const std::lock_guard lock(mutex_);
    if (known) return *known;
  }
  std::string refusal;
  try {
    try_sharing(device);
  } catch (const Exception& e) {
    refusal = e.error().message;
  }
  const std::lock_guard lock(mutex_);
  Device& tried = devices_[static_cast<std::size_t>(device)];
  if (!known && (refusal.empty() || ++tried.failed_trials == kMostTrials)) known = refusal;
  return known.value_or(refusal);
}

bool Devices::shares(int device) {
  const std::lock_guard lock(mutex_);
  const auto& refusal = devices_[static_cast<std::size_t>(device)].sharing_refusal;
  return refusal && refusal->empty();
}

void Devices::refuse_sharing(int device, const std::string& reason) {
  receiving_ &= ~(std::uint64_t{1} << device);
  const std::lock_guard lock(mutex_);
  devices_[static_cast<std::size_t>(device)].sharing_refusal = reason;
}

void Devices::try_sharing(int device) {
  int supported = 0;
  if (knows_sharing(driver_)) {
    check(driver_.device_attribute(&supported, kSharesDescriptors, number(device)), device,
          "asking whether its memory can be shared");
  }
  if (supported == 0) {
    throw Exception(ErrorCode::error, "CUDA cannot share memory of " + device_text(device) +
                                          " between processes here");
  }
  uid(device);
  const DeviceMemory memory = create(device, kTrialBytes);
  try {
    free(device, map(device, export_to_processes(device, memory), memory.bytes));
  } catch (...) {
    free(device, memory);
    throw;
  }
  free(device, memory);
}

Uid Devices::uid(int device) {
  DeviceUuid uuid;
  check(driver_.device_uuid(&uuid, number(device)), device, "asking for its UUID");
  Uid uid;
  static_assert(sizeof uuid.bytes == sizeof uid.high + sizeof uid.low);
  std::memcpy(&uid.high, uuid.bytes, sizeof uid.high);
  std::memcpy(&uid.low, uuid.bytes + sizeof uid.high, sizeof uid.low);
  return uid;
}

std::optional<int> Devices::find(const Uid& wanted) {
  for (int device = 0; device < std::min(count_, kMostReceiving); ++device) {
    if ((receiving() >> device & 1) != 0 && uid(device) == wanted) return device;
  }
  return std::nullopt;
}

std::string Devices::receives(int device) {
  if (!share_ || device >= kMostReceiving || (receiving() >> device & 1) != 0) return {};
  std::string refusal = sharing_refusal(device);
  if (refusal.empty()) receiving_ |= std::uint64_t{1} << device;
  return refusal;
}

}  // namespace moolink::device
