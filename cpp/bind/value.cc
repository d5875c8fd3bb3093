#include "bind/value.h"

#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/gil.h"
#include "bind/registered_types.h"
#include "bind/replay_state.h"
#include "wire/crc32c.h"

namespace moolink::bind {
namespace {

ValueOptions options_of(bool allow_pickle, std::string_view arrays, std::size_t max_depth) {
  ValueOptions options;
  options.allow_pickle = allow_pickle;
  options.arrays = parse_array_kind(arrays);
  options.limits.max_depth = max_depth;
  return options;
}

nb::bytes to_bytes(const Buffer& buffer) {
  return nb::bytes(reinterpret_cast<const char*>(buffer.data()), buffer.size());
}

Buffer to_buffer(const nb::bytes& bytes) {
  return private_copy({nullptr, reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()});
}

using Parts = nb::typed<nb::list, nb::bytes>;

nb::typed<nb::tuple, nb::bytes, Parts> encode(nb::handle value, bool allow_pickle,
                                              std::size_t max_depth, std::size_t max_message) {
  HeapAllocator heap;
  ValueOptions options = options_of(allow_pickle, "same", max_depth);
  options.limits.max_message = max_message;
  const wire::Payload payload = encode_value(value, options, heap);
  nb::list parts;
  for (const Buffer& part : payload.parts) parts.append(to_bytes(part));
  return nb::make_tuple(to_bytes(payload.body), parts);
}

nb::any decode(const nb::bytes& body, const Parts& parts, bool allow_pickle,
               std::string_view arrays, std::size_t max_depth) {
  wire::Payload payload;
  payload.body = to_buffer(body);
  for (const nb::handle part : parts) {
    payload.parts.push_back(to_buffer(nb::cast<nb::bytes>(part)));
  }
  return nb::borrow<nb::any>(decode_value(payload, options_of(allow_pickle, arrays, max_depth)));
}

std::uint32_t checksum(const Given<std::uint8_t>& bytes, std::uint32_t before) {
  const GilRelease unlocked;
  return wire::crc32c(std::as_bytes(span_of(bytes)), before);
}

}  // namespace

void bind_values(nb::module_& m) {
  bind_tensors(m);
  bind_registered_types(m);
  const std::size_t max_depth = Limits{}.max_depth;
  m.def("encode", &encode, nb::arg("value").none(), nb::kw_only(), nb::arg("allow_pickle") = false,
        nb::arg("max_depth") = max_depth, nb::arg("max_message") = Limits{}.max_message,
        "The message that a value becomes: its body and the bytes of its arrays.");
  m.def("decode", &decode, nb::arg("body"), nb::arg("parts"), nb::kw_only(),
        nb::arg("allow_pickle") = false, nb::arg("arrays") = "same",
        nb::arg("max_depth") = max_depth, "The value of a message; raises WireError.");
  m.def("crc32c", &checksum, nb::arg("bytes"), nb::arg("before") = 0,
        "The CRC-32C of bytes, or of all bytes so far: `before` is the sum of those before these.",
        nb::sig("def crc32c(bytes: bytes | memoryview | numpy.typing.NDArray[numpy.uint8], before: "
                "int = 0) -> int"));
}

}  // namespace moolink::bind
