#include "bind/device.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/tensor_kinds.h"
#include "device/block.h"

namespace moolink::bind {
namespace {

// A tensor whose elements span more memory is not copied with its gaps.
constexpr std::size_t kWidestSpan = 16;  // times its elements
constexpr std::size_t kSmallSpan = std::size_t{1} << 20;

nb::object device_arrays() { return nb::module_::import_("moolink.data.device_arrays"); }

bool becomes_cupy(const wire::TensorHead& head, ArrayKind arrays) {
  return head.framework == wire::Framework::cupy && arrays == ArrayKind::same &&
         loaded("cupy", "ndarray").is_valid();
}

// The number of devices that this process can use; 0 without a driver.
std::uint32_t usable_devices() {
  try {
    return static_cast<std::uint32_t>(device::Devices::process().count());
  } catch (const Exception&) {
    return 0;
  }
}

// Elements of the host's memory or of a device, that of another process, too.
void copy_to_place(device::Stream& stream, std::span<const std::byte> elements, std::byte* place) {
  const auto block = device::block_of(elements.data());
  const bool here = block != nullptr && block->device() == stream.device();
  const MutableBuffer host = block == nullptr || here ? MutableBuffer() : host_copy(elements);
  const device::Transfer transfer{host.empty() ? elements.data() : host.data(), place,
                                  elements.size()};
  const GilRelease released;
  here ? stream.copy_within_device({&transfer, 1}) : stream.copy_to_device({&transfer, 1});
}

// Peers on this machine may lend the device's memory from now on.
void say_that_it_receives(int device) {
  const std::string refusal =
      without_gil([&] { return device::Devices::process().receives(device); });
  static bool told = false;  // with the GIL
  if (refusal.empty() || std::exchange(told, true)) return;
  log_info("arrays on CUDA devices come through the host's memory: " + refusal);
}

}  // namespace

MutableBuffer host_copy(std::span<const std::byte> elements) {
  const MutableBuffer memory = HeapAllocator().allocate(elements.size());
  if (elements.empty()) return memory;
  const auto block = device::block_of(elements.data());
  unlocked_if(block != nullptr || elements.size() >= kUnlockedCopy, [&] {
    if (block != nullptr) return block->copy_to_host(elements, memory.data());
    std::memcpy(memory.data(), elements.data(), elements.size());
  });
  return memory;
}

DeviceChoice parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "same") return {.same = true, .device = {}};
  constexpr std::string_view kPrefix = "cuda:";
  std::uint32_t number = 0;
  bool known = text == "cuda";
  if (text.starts_with(kPrefix)) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data() + kPrefix.size(), end, number);
    known = error == std::errc() && rest == end && number < wire::kMaxDevices;
  }
  if (known) {
    device::load_driver();  // fails early; it is not initialised, which would forbid a fork
    return {.same = false, .device = number};
  }
  value_error("device must be \"cpu\", \"same\" or \"cuda:N\", not \"" + std::string(text) + "\"");
}

DeviceCopies::OfStream& DeviceCopies::of_stream(const ImportedTensor& tensor) {
  const auto found = std::find_if(streams_.begin(), streams_.end(), [&](const OfStream& known) {
    return known.stream == tensor.stream.get();
  });
  return found == streams_.end() ? streams_.emplace_back(OfStream{tensor.stream.get(), {}, {}})
                                 : *found;
}

Buffer DeviceCopies::keep(const ImportedTensor& from) {
  const tensor::TensorRef& tensor = from.tensor;
  if (!device::is_on_device(tensor.device)) return {};  // pinned or managed: the host reads it
  if (!tensor.is_contiguous()) return {};
  MutableBuffer memory;
  try {
    memory = device::allocate(device::Devices::process(), from.stream->device(), from.bytes());
  } catch (const Exception&) {
    return {};  // the host's memory will do
  }
  of_stream(from).kept.push_back({tensor.data, memory.data(), from.bytes()});
  return memory;
}

void DeviceCopies::add(const ImportedTensor& from, std::byte* to) {
  OfStream& group = of_stream(from);
  const tensor::TensorRef& tensor = from.tensor;
  if (tensor.is_contiguous()) {
    group.to_host.push_back({tensor.data, to, from.bytes()});
    return;
  }
  const ImportedTensor::Span span = from.span();
  if (span.bytes > std::max(kSmallSpan, kWidestSpan * from.bytes())) {
    throw Exception(ErrorCode::invalid_argument,
                    "a tensor of shape " + tensor::shape_text(tensor.shape) + " on " +
                        tensor.device.name() + " has gaps that are too wide; make it contiguous");
  }
  auto memory = std::make_unique<std::byte[]>(span.bytes);
  group.to_host.push_back({tensor.data + span.begin, memory.get(), span.bytes});
  gatherings_.push_back({&from, std::move(memory), -span.begin, to});
}

void DeviceCopies::run() {
  for (const OfStream& group : streams_) {
    group.stream->copy_within_device(group.kept);
    group.stream->copy_to_host(group.to_host);
  }
  for (const Gathering& one : gatherings_) {
    const tensor::TensorRef& tensor = one.tensor->tensor;
    tensor::gather(one.memory.get() + one.first, one.tensor->item_size(), tensor.shape,
                   tensor.strides, one.to);
  }
}

std::optional<std::uint32_t> device_for(const wire::TensorHead& head, ArrayKind arrays,
                                        const DeviceChoice& choice) {
  if (!choice.device && !(choice.same && head.device)) return std::nullopt;
  if (array_kind(head, arrays) == ArrayKind::numpy && !becomes_cupy(head, arrays)) {
    return std::nullopt;
  }
  if (choice.device) return choice.device;
  return *head.device < usable_devices() ? head.device : std::nullopt;
}

nb::object export_to_device(std::span<const std::byte> elements, const wire::TensorHead& head,
                            ArrayKind arrays, std::uint32_t device) {
  const ArrayKind kind = array_kind(head, arrays);
  if (kind == ArrayKind::jax) {  // it copies a host array to the device itself
    const nb::object array = export_tensor(host_copy(elements), head, ArrayKind::numpy);
    return device_arrays().attr("put_by_jax")(array, device);
  }
  const std::string dtype(tensor::dtype_name(head.dtype));
  const nb::tuple shape(nb::cast(head.shape));
  // The array, the address of its elements, and the stream whose work may still use that memory.
  const nb::object made = device_arrays().attr(
      kind == ArrayKind::torch ? "empty_of_torch" : "empty_of_cupy")(shape, dtype, device);
  const auto place = nb::cast<std::uintptr_t>(made[1]);
  const nb::object after = made[2];
  if (!elements.empty()) {
    const auto stream = device::Devices::process().stream(static_cast<int>(device));
    if (!after.is_none()) {
      stream->follow(reinterpret_cast<void*>(nb::cast<std::uintptr_t>(after)));
    }
    copy_to_place(*stream, elements, reinterpret_cast<std::byte*>(place));
    say_that_it_receives(stream->device());
  }
  return made[0];
}

namespace {

// A host array's memory, to read or write.
std::span<std::byte> memory_of(nb::handle array, bool to_write) {
  const ImportedTensor imported = import_numbers(array);
  const tensor::TensorRef& tensor = imported.tensor;
  if (!tensor.is_contiguous() || (to_write && tensor.read_only)) {
    throw nb::value_error("an array has gaps, or cannot be written");
  }
  return {tensor.data, imported.bytes()};
}

using Objects = nb::typed<nb::list, nb::any>;

void copy_to_host(const Objects& tensors, const Objects& arrays) {
  std::vector<ImportedTensor> imported;
  imported.reserve(tensors.size());  // the copies refer to them
  DeviceCopies copies;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto tensor = import_tensor(tensors[i]);
    const std::span<std::byte> place = memory_of(arrays[i], true);
    if (!tensor || tensor->stream == nullptr || tensor->bytes() != place.size()) {
      throw nb::value_error("a tensor is on no device, or of another size than its array");
    }
    copies.add(imported.emplace_back(std::move(*tensor)), place.data());
  }
  const GilRelease released;
  copies.run();
}

void copy_to_device(nb::handle array, std::uintptr_t address, std::uint32_t device) {
  const std::span<const std::byte> elements = memory_of(array, false);
  const auto stream = device::Devices::process().stream(static_cast<int>(device));
  const device::Transfer transfer{elements.data(), reinterpret_cast<std::byte*>(address),
                                  elements.size()};
  const GilRelease released;
  stream->copy_to_device({&transfer, 1});
}

}  // namespace

nb::dict cuda_info() {
  const device::Devices* devices = device::Devices::process_if_used();
  const device::Counters counters = devices == nullptr ? device::Counters{} : devices->counters();
  nb::dict info;
  info["used"] = devices != nullptr;
  info["bytes_to_host"] = counters.bytes_to_host;
  info["bytes_to_device"] = counters.bytes_to_device;
  info["copies_to_host"] = counters.copies_to_host;
  info["copies_to_device"] = counters.copies_to_device;
  info["pinned_bytes"] = counters.pinned_bytes;
  info["bytes_within_device"] = counters.bytes_within_device;
  return info;
}

void bind_device(nb::module_& m) {
  m.def("copy_to_host", &copy_to_host, nb::arg("tensors"), nb::arg("arrays"),
        "Copies tensors on devices into host arrays of the same sizes, in row-major order.");
  m.def("copy_to_device", &copy_to_device, nb::arg("array"), nb::arg("address"), nb::arg("device"),
        "Copies a host array into memory of a device that no queued work uses.");
  m.def("cuda_info", &cuda_info,
        "Returns counts of this process's copies from and to CUDA devices.",
        nb::sig("def cuda_info() -> moolink.reports.CudaInfo"));
}

}  // namespace moolink::bind
