// moolink.jax.all_reduce inside compiled programs: a typed XLA custom call, on CPUs and on CUDA
// devices.
//
// Operands: arrays, then the token's epoch (uint32) and its chain (float32), which orders calls of
// one program and carries no value. Results: the reduced arrays, then the chain. Attributes, all
// text: group, layout, name, on_change, op.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/context.h"
#include "bind/errors.h"
#include "bind/group.h"
#include "bind/xla_ffi.h"
#include "device/devices.h"
#include "runtime/group/program_reduce.h"

namespace moolink::bind {

namespace nb = nanobind;

namespace {

using tensor::DType;

[[noreturn]] void refuse(const std::string& what) {
  throw Exception(ErrorCode::invalid_argument, "all_reduce in a program: " + what);
}

DType dtype_of(int type) {
  // Numbers of XLA's PrimitiveType.
  static constexpr std::pair<int, DType> kTypes[] = {{1, DType::boolean},
                                                     {2, DType::int8},
                                                     {3, DType::int16},
                                                     {4, DType::int32},
                                                     {5, DType::int64},
                                                     {6, DType::uint8},
                                                     {7, DType::uint16},
                                                     {8, DType::uint32},
                                                     {9, DType::uint64},
                                                     {10, DType::float16},
                                                     {11, DType::float32},
                                                     {12, DType::float64},
                                                     {15, DType::complex64},
                                                     {16, DType::bfloat16},
                                                     {18, DType::complex128},
                                                     {19, DType::float8_e5m2},
                                                     {20, DType::float8_e4m3fn},
                                                     {24, DType::float8_e5m2fnuz},
                                                     {25, DType::float8_e4m3fnuz},
                                                     {33, DType::float8_e8m0fnu}};
  for (const auto& [number, dtype] : kTypes) {
    if (number == type) return dtype;
  }
  refuse("elements of XLA's type " + std::to_string(type) + " cannot be reduced");
}

const xla::Buffer& buffer(const xla::Arguments& arguments, std::int64_t index) {
  constexpr int kBuffer = 1;
  if (arguments.types[index] != kBuffer) refuse("an operand is no array");
  return *static_cast<const xla::Buffer*>(arguments.values[index]);
}

std::int64_t count(const xla::Buffer& buffer) {
  std::int64_t elements = 1;
  for (std::int64_t i = 0; i < buffer.rank; ++i) elements *= buffer.dims[i];
  return elements;
}

std::string attribute(const xla::Attributes& attributes, std::string_view name) {
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    const xla::ByteSpan& its = *attributes.names[i];
    if (std::string_view(its.data, its.size) != name) continue;
    if (attributes.types[i] != xla::AttributeType::string) break;
    const auto* text = static_cast<const xla::ByteSpan*>(attributes.values[i]);
    return {text->data, text->size};
  }
  refuse("its attribute '" + std::string(name) + "' is missing");
}

collective::ReduceOp op_of(const std::string& name) {
  if (const auto op = collective::kOpNames.find(name)) return *op;
  refuse("there is no op '" + name + "'");
}

// A program's request. Its memory is the host's, or a device's.
struct Call {
  runtime::ProgramReduction reduction;  // without the epoch, which lies in the program's memory
  std::shared_ptr<runtime::GroupPeer> group;
  std::vector<runtime::ProgramOperand> operands;
  std::span<const std::byte> epoch;
  std::span<std::byte> chain;

  void set_epoch(const void* value) {
    if (!epoch.empty()) std::memcpy(&reduction.epoch, value, sizeof(reduction.epoch));
  }
};

template <class Element>
std::span<std::byte> bytes_of(const xla::Buffer& buffer) {
  return {static_cast<std::byte*>(buffer.data),
          static_cast<std::size_t>(count(buffer)) * sizeof(Element)};
}

Call read_call(const xla::CallFrame& frame) {
  constexpr std::int64_t kToken = 2;  // operands
  const std::int64_t arrays = frame.arguments.size - kToken;
  if (arrays < 0 || frame.results.size != arrays + 1) refuse("operands and results do not match");
  Call call;
  for (std::int64_t i = 0; i < arrays; ++i) {
    const xla::Buffer& from = buffer(frame.arguments, i);
    const xla::Buffer& to = buffer(frame.results, i);
    const DType dtype = dtype_of(from.dtype);
    const std::size_t bytes = static_cast<std::size_t>(count(from)) * tensor::item_size(dtype);
    call.operands.push_back(
        {dtype, static_cast<const std::byte*>(from.data), static_cast<std::byte*>(to.data), bytes});
  }
  call.epoch = bytes_of<std::uint32_t>(buffer(frame.arguments, arrays));
  call.chain = bytes_of<float>(buffer(frame.results, arrays));
  runtime::ProgramReduction& reduction = call.reduction;
  reduction.name = attribute(frame.attributes, "name");
  reduction.op = op_of(attribute(frame.attributes, "op"));
  reduction.layout = attribute(frame.attributes, "layout");
  reduction.retry = attribute(frame.attributes, "on_change") == "retry";
  const std::string key = attribute(frame.attributes, "group");
  call.group = find_program_group(key);
  if (call.group == nullptr) {
    throw Exception(ErrorCode::closed, "all_reduce '" + reduction.name + "': there is no group '" +
                                           key + "' in this process, or it was closed");
  }
  return call;
}

void all_reduce(const xla::CallFrame& frame) {
  Call call = read_call(frame);
  call.set_epoch(call.epoch.data());
  runtime::reduce_for_program(*call.group, call.reduction, call.operands, signal_check());
  std::fill(call.chain.begin(), call.chain.end(), std::byte{0});
}

// --- on a CUDA device

// The copy stream of the program's device; the program's work precedes it.
std::shared_ptr<device::Stream> stream_of(const xla::CallFrame& frame) {
  const xla::Api& api = *frame.api;
  if (api.struct_size < sizeof(xla::Api)) {
    refuse("this jaxlib does not name the device of a program: use a newer one");
  }
  xla::DeviceOrdinalGetArgs device{sizeof(device), nullptr, frame.context, 0};
  xla::StreamGetArgs stream{sizeof(stream), nullptr, frame.context, nullptr};
  if (api.device_ordinal_get(&device) != nullptr || api.stream_get(&stream) != nullptr) {
    refuse("XLA reports no device or no stream for this program");
  }
  auto copies = device::Devices::process().stream(device.device_ordinal);
  copies->follow(stream.stream);
  return copies;
}

// XLA queues the program's next work once this has returned: the results are there by then.
void all_reduce_on_device(const xla::CallFrame& frame) {
  const std::shared_ptr<device::Stream> stream = stream_of(frame);
  Call call = read_call(frame);
  std::size_t bytes = 0;
  for (const runtime::ProgramOperand& operand : call.operands) bytes += operand.bytes;
  Allocator& pool = call.group->rpc()->context()->pool();
  const MutableBuffer inputs = pool.allocate(bytes + call.epoch.size());
  const MutableBuffer outputs = pool.allocate(bytes + call.chain.size());
  std::vector<runtime::ProgramOperand> on_host = call.operands;
  std::vector<device::Transfer> to_host;
  std::vector<device::Transfer> to_device;
  std::size_t at = 0;
  for (runtime::ProgramOperand& operand : on_host) {
    std::byte* const input = inputs.data() + at;
    std::byte* const output = outputs.data() + at;
    to_host.push_back({std::exchange(operand.input, input), input, operand.bytes});
    to_device.push_back({output, std::exchange(operand.output, output), operand.bytes});
    at += operand.bytes;
  }
  to_host.push_back({call.epoch.data(), inputs.data() + at, call.epoch.size()});
  to_device.push_back({outputs.data() + at, call.chain.data(), call.chain.size()});
  stream->copy_to_host(to_host);
  call.set_epoch(inputs.data() + at);
  runtime::reduce_for_program(*call.group, call.reduction, on_host, signal_check());
  std::fill_n(outputs.data() + at, call.chain.size(), std::byte{0});
  stream->copy_to_device(to_device);
}

xla::Code code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::timeout:
      return xla::Code::deadline_exceeded;
    case ErrorCode::cancelled:
      return xla::Code::cancelled;
    case ErrorCode::group_changed:
      return xla::Code::aborted;
    case ErrorCode::peer_lost:
      return xla::Code::unavailable;
    case ErrorCode::closed:
      return xla::Code::failed_precondition;
    case ErrorCode::invalid_argument:
      return xla::Code::invalid_argument;
    default:
      return xla::Code::unknown;
  }
}

xla::Error* make_error(const xla::Api* api, xla::Code code, const std::string& message) {
  xla::ErrorCreateArgs arguments{sizeof(xla::ErrorCreateArgs), nullptr, message.c_str(), code};
  return api->error_create(&arguments);
}

// Checks XLA's version; a newer XLA provides more than is requested here.
xla::Error* describe(const xla::CallFrame& frame) {
  const xla::Version& theirs = frame.api->api_version;
  if (theirs.major_version != xla::kMajor) {
    return make_error(frame.api, xla::Code::unimplemented,
                      "moolink knows XLA's custom calls of version 0, not " +
                          std::to_string(theirs.major_version) + ": use an older jaxlib");
  }
  auto* metadata = reinterpret_cast<xla::MetadataExtension*>(frame.extension_start)->metadata;
  metadata->api_version = {sizeof(xla::Version), nullptr, xla::kMajor, theirs.minor_version};
  metadata->traits = 0;
  return nullptr;
}

PyObject* raised = nullptr;  // by a signal handler; guarded by the GIL

int raise_again(void* /*unused*/) {
  const nb::object error = nb::steal(std::exchange(raised, nullptr));
  if (!error.is_valid()) return 0;
  set_raised(error);
  return -1;
}

// A signal handler has raised in the main thread, such as KeyboardInterrupt. JAX turns any failure
// of the program into an error of its own, so Python raises it again as soon as it runs again.
void raise_later(nb::python_error& e) {
  const nb::gil_scoped_acquire locked;
  if (Py_AddPendingCall(raise_again, nullptr) != 0) {
    e.discard_as_unraisable("moolink.jax.all_reduce");
    return;
  }
  Py_XDECREF(std::exchange(raised, nb::borrow(e.value()).release().ptr()));
}

// Called by XLA on its own threads or the user's, without the GIL.
template <void (*AllReduce)(const xla::CallFrame&)>
xla::Error* handle(xla::CallFrame* frame) {
  if (frame->extension_start != nullptr &&
      frame->extension_start->type == xla::ExtensionType::metadata) {
    return describe(*frame);
  }
  if (frame->stage != xla::Stage::execute) return nullptr;
  try {
    AllReduce(*frame);
    return nullptr;
  } catch (nb::python_error& e) {
    raise_later(e);
    return make_error(frame->api, xla::Code::cancelled,
                      "moolink.CancelledError: a signal ended the wait");
  } catch (const Exception& e) {  // moolink.jax raises the class of that name
    return make_error(frame->api, code_of(e.error().code),
                      std::string("moolink.") + class_name(e.error().code) + ": " + e.what());
  } catch (const std::exception& e) {
    return make_error(frame->api, xla::Code::internal, std::string("moolink.Error: ") + e.what());
  }
}

}  // namespace

void bind_xla(nb::module_& m) {
  m.def(
      "xla_all_reduce", [] { return nb::capsule(reinterpret_cast<void*>(&handle<all_reduce>)); },
      "Returns the handler of moolink.jax's custom call on CPUs, for jax.ffi.register_ffi_target.",
      nb::sig("def xla_all_reduce() -> object"));
  m.def(
      "xla_all_reduce_on_cuda",
      [] { return nb::capsule(reinterpret_cast<void*>(&handle<all_reduce_on_device>)); },
      "Returns the handler of moolink.jax's custom call on CUDA devices, for "
      "jax.ffi.register_ffi_target.",
      nb::sig("def xla_all_reduce_on_cuda() -> object"));
}

}  // namespace moolink::bind
