#pragma once

// The typed codec of values: Python's types by their exact kind, tensors by reference to the
// message's parts. ValueWriter takes the tokens of a walk, ValueReader returns them one by one.
// Neither knows Python; cpp/bind/value_encode.cc walks objects, value_decode.cc builds them.
//
// A container's size is followed by as many values (a dict's by key, value, key, value ...), a
// record's type by its fields' values, flags and convert by one value.

#include <complex>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/limits.h"
#include "tensor/dtype.h"
#include "tensor/layout.h"
#include "wire/archive.h"
#include "wire/payload.h"

namespace moolink::wire {

// The numbers are part of the protocol: append, never renumber.
enum class ValueTag : std::uint8_t {
  none,
  false_,
  true_,
  integer,      // zigzag varint of 64 bits
  big_integer,  // two's complement, little-endian
  real,
  complex,
  string,  // UTF-8, lone surrogates kept (Python's "surrogatepass")
  bytes,
  bytearray,
  list,
  tuple,
  set,
  frozenset,
  dict,
  record,   // of a registered type with named fields
  member,   // of a registered enum: its name
  flags,    // of a registered flag enum: its integer
  convert,  // of a type registered with converters: its state
  scalar,   // numpy's
  tensor,
  pickle,
  device_tensor,  // a tensor from a CUDA device, after the device's number
};
constexpr ValueTag enum_max(ValueTag) { return ValueTag::device_tensor; }

// The framework of a tensor's object.
enum class Framework : std::uint8_t { numpy, torch, jax, other, cupy };
constexpr Framework enum_max(Framework) { return Framework::cupy; }

inline constexpr std::uint32_t kMaxDevices = 1024;  // of a host, by their numbers

// A registered type as both sides know it. Fields are compared on receipt, so that two versions of
// a dataclass do not mix silently.
struct TypeHead {
  std::string name;
  std::vector<std::string> fields;
};

// A tensor in row-major order without gaps.
struct TensorHead {
  Framework framework = Framework::numpy;
  tensor::DType dtype = tensor::DType::uint8;
  // When set, numpy's own description of an element type that only numpy has, in place of dtype:
  // "<M8[ns]", "<m8[25us]", "<U12", "|S3" (see numpy_item_size).
  std::string numpy_type;
  tensor::Shape shape;
  // The CUDA device of the tensor at its sender; its bytes travel like any tensor's.
  std::optional<std::uint32_t> device = std::nullopt;

  std::size_t item_size() const;
};

// Bytes of an element of numpy's dates, durations, strings and byte strings; empty when the text is
// not exactly the description of one of these. An empty string takes 0 bytes ("<U0"); only scalars
// can have such a type.
std::optional<std::size_t> numpy_item_size(std::string_view numpy_type);

// Tensors up to this size are in the body; larger ones are parts.
inline constexpr std::size_t kInlineTensorBytes = 64;

class ValueWriter {
 public:
  explicit ValueWriter(const Limits& limits) : max_body_(limits.max_body) {}

  void none() { tag(ValueTag::none); }
  void boolean(bool value) { tag(value ? ValueTag::true_ : ValueTag::false_); }
  void integer(std::int64_t value) {
    tag(ValueTag::integer);
    writer_.zigzag(value);
  }
  void real(double value);
  void complex(std::complex<double> value);
  void string(std::string_view utf8) { sized(ValueTag::string, utf8.data(), utf8.size()); }
  // big_integer, bytes, bytearray or pickle.
  void bytes(ValueTag kind, std::span<const std::byte> value) {
    sized(kind, value.data(), value.size());
  }

  // list, tuple, set, frozenset, or dict, whose size is the number of pairs.
  void begin(ValueTag kind, std::size_t size) {
    tag(kind);
    writer_.varint(size);
  }

  // record, flags or convert. A type is written in full once per message and by number afterwards;
  // `type` must not move until take().
  void begin(ValueTag kind, const TypeHead& type);
  void member(const TypeHead& type, std::string_view name);

  // `value`: the bytes of the scalar, or of all the tensor's elements.
  void scalar(const TensorHead& head, std::span<const std::byte> value);
  void inline_tensor(const TensorHead& head, std::span<const std::byte> value) {
    tensor(head, true);
    writer_.raw(value.data(), value.size());
  }
  // The tensor's bytes are the message's next part.
  void part_tensor(const TensorHead& head) { tensor(head, false); }

  Buffer take() { return writer_.take(); }

 private:
  void tag(ValueTag kind) {
    if (writer_.size() > max_body_) too_large(writer_.size());
    writer_.byte(static_cast<std::uint8_t>(kind));
  }
  void sized(ValueTag kind, const void* data, std::size_t size);
  void element_type(const TensorHead& head);
  void tensor(const TensorHead& head, bool is_inline);
  [[noreturn]] void too_large(std::size_t size) const;  // throws ErrorCode::invalid_argument

  std::size_t max_body_;
  Writer writer_;
  std::vector<const TypeHead*> types_;
};

inline constexpr std::size_t kNoPart = std::numeric_limits<std::size_t>::max();

// One step of a walk. Views point into the body.
struct ValueToken {
  ValueTag tag = ValueTag::none;
  std::int64_t integer = 0;
  std::complex<double> number;       // real, complex
  std::span<const std::byte> bytes;  // string, bytes, pickle, member's name, scalar ...
  std::size_t size = 0;              // of a container; of a record its fields
  std::size_t type = 0;              // record, member, flags, convert: index into types()
  std::size_t part = kNoPart;        // tensor: its part, or none: the elements are in bytes
  // Never device_tensor: that token is a tensor whose head has a device.

  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
};

// Throws ErrorCode::wire for anything that ValueWriter does not write: unknown tags, sizes that the
// remaining bytes cannot hold, values nested deeper than the limit, parts of a wrong size, leftover
// parts or bytes.
class ValueReader {
 public:
  ValueReader(const Payload& payload, const Limits& limits);

  // The next token; must not be called after done().
  const ValueToken& next();
  // Whether the value is complete. All parts and bytes have been used then.
  bool done() const { return open_.empty(); }

  const std::vector<TypeHead>& types() const { return types_; }
  // Of the last token, if it is a tensor or scalar.
  const TensorHead& tensor() const { return tensor_; }

 private:
  void take_place();
  void open(std::uint64_t values);
  void close_full();
  void read_container();
  void read_type();
  void read_tensor();
  void read_device_tensor();
  void read_scalar();
  void read_element_type();
  void read_bytes();
  void take_bytes(std::size_t size) { token_.bytes = {reader_.raw(size), size}; }

  const std::vector<Buffer>& parts_;
  std::size_t max_depth_;
  Reader reader_;
  ValueToken token_;
  TensorHead tensor_;
  std::vector<TypeHead> types_;
  std::vector<std::uint64_t> open_;  // values still to come, one count for each level
  std::uint64_t owed_ = 1;           // their sum: each needs a byte at least
  std::size_t next_part_ = 0;
};

}  // namespace moolink::wire
