#pragma once

// Tensors that lie on CUDA devices, and those that are to be put there.

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

// Where received tensors are put; by default in host memory.
struct DeviceChoice {
  bool same = false;                    // those from a device: on the one of the same number
  std::optional<std::uint32_t> device;  // all of them, on this one
};
DeviceChoice parse_device(std::string_view text);  // throws ValueError

// Copies of tensors from devices that are waited for together: small ones share a transfer.
class DeviceCopies {
 public:
  // The elements in row-major order; both must stay until run() has returned.
  void add(const ImportedTensor& from, std::byte* to);
  // In memory of the tensor's device; empty: there is none left, or the tensor has gaps or lies in
  // the host's memory.
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

// The device that a received tensor is to be put on; empty: it stays in host memory.
std::optional<std::uint32_t> device_for(const wire::TensorHead& head, ArrayKind arrays,
                                        const DeviceChoice& choice);

// An array on the device, in memory of its framework's own, with these elements. It is complete:
// any stream may read it. Throws what the framework raises, and Exception{error}.
nb::object export_to_device(std::span<const std::byte> elements, const wire::TensorHead& head,
                            ArrayKind arrays, std::uint32_t device);

// What this process has copied, as moolink._core.CudaInfo.
nb::dict cuda_info();

void bind_device(nb::module_& m);

}  // namespace moolink::bind
