#pragma once

// Tensors on CUDA devices, and tensors to be placed there.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "bind/tensor.h"

namespace moolink::bind {

// The place of received tensors; by default host memory.
struct DeviceChoice {
  bool same = false;                    // those from a device: on that of the same number
  std::optional<std::uint32_t> device;  // all of them, on this one
};
DeviceChoice parse_device(std::string_view text);  // throws ValueError

// Copies of tensors from devices, with a single wait: small ones share a transfer.
class DeviceCopies {
 public:
  // The elements in row-major order; both must stay until run() has returned.
  void add(const ImportedTensor& from, std::byte* to);
  // In memory of the tensor's device; empty: none is left, the tensor has gaps or is in the host's
  // memory.
  Buffer keep(const ImportedTensor& from);
  // Needs no GIL, and waits for the devices. Throws Exception{error}.
  void run();

 private:
  struct OfStream {
    device::Stream* stream;
    std::vector<device::Transfer> to_host;
    std::vector<device::Transfer> kept;
  };
  // A tensor with gaps, copied with them and gathered here.
  struct Gathering {
    const ImportedTensor* tensor;
    std::unique_ptr<std::byte[]> memory;
    std::ptrdiff_t first;  // offset of its first element
    std::byte* to;
  };
  OfStream& of_stream(const ImportedTensor& tensor);

  std::vector<OfStream> streams_;
  std::vector<Gathering> gatherings_;
};

// The device for a received tensor; empty: it stays in host memory.
std::optional<std::uint32_t> device_for(const wire::TensorHead& head, ArrayKind arrays,
                                        const DeviceChoice& choice);

// An aligned copy in the host's memory of elements there or on a device. Needs the GIL, and
// releases it during a long copy.
MutableBuffer host_copy(std::span<const std::byte> elements);

// An array on the device, in its framework's own memory, with these elements. It is complete: any
// stream may read it. Throws the framework's exceptions, and Exception{error}.
nb::object export_to_device(std::span<const std::byte> elements, const wire::TensorHead& head,
                            ArrayKind arrays, std::uint32_t device);

// The copies of this process, as moolink._core.CudaInfo.
nb::dict cuda_info();

}  // namespace moolink::bind
