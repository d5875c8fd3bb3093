#include "wire/value.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace moolink::wire {
namespace {

// The element type travels as a DType, or as this number before numpy's description.
constexpr std::uint8_t kNumpyType = 0xff;
constexpr std::size_t kMaxTypeName = 1024;
constexpr std::size_t kMaxFields = 4096;
constexpr std::size_t kMaxNumpyType = 32;

bool read_digits(std::string_view& text, std::uint64_t& number) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  if (digits == 0 || digits > 9 || text.front() == '0') return false;
  number = 0;
  for (const char digit : text.substr(0, digits)) {
    number = number * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  text.remove_prefix(digits);
  return true;
}

// "[ns]", "[25us]" or nothing: numpy's unit of a date or duration.
bool is_time_unit(std::string_view text) {
  if (text.empty()) return true;
  if (text.size() < 3 || text.front() != '[' || text.back() != ']') return false;
  text = text.substr(1, text.size() - 2);
  std::uint64_t multiple = 1;
  if (text.front() >= '0' && text.front() <= '9') {
    if (!read_digits(text, multiple)) return false;
  }
  static constexpr std::array<std::string_view, 13> kUnits = {
      "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"};
  return std::ranges::find(kUnits, text) != kUnits.end();
}

}  // namespace

std::optional<std::size_t> numpy_item_size(std::string_view text) {
  if (text.size() < 3 || text.size() > kMaxNumpyType) return std::nullopt;
  if (text == "<U0" || text == "|S0") return 0;
  const char order = text[0];
  const char kind = text[1];
  text.remove_prefix(2);
  std::uint64_t number = 0;
  if (!read_digits(text, number)) return std::nullopt;
  if (order == '<' && (kind == 'M' || kind == 'm')) {
    if (number != 8 || !is_time_unit(text)) return std::nullopt;
    return 8;
  }
  if (!text.empty()) return std::nullopt;
  if (order == '<' && kind == 'U') return number * 4;
  if (order == '|' && kind == 'S') return number;
  return std::nullopt;
}

std::size_t TensorHead::item_size() const {
  return numpy_type.empty() ? tensor::item_size(dtype) : numpy_item_size(numpy_type).value_or(0);
}

void ValueWriter::too_large(std::size_t size) const {
  throw Exception(ErrorCode::invalid_argument, "the value takes more than " + std::to_string(size) +
                                                   " bytes, the limit beside its arrays is " +
                                                   std::to_string(max_body_) +
                                                   "; send large data as arrays");
}

void ValueWriter::sized(ValueTag kind, const void* data, std::size_t size) {
  tag(kind);
  if (size > max_body_) too_large(size);
  writer_.sized(data, size);
}

void ValueWriter::real(double value) {
  tag(ValueTag::real);
  writer_(value);
}

void ValueWriter::complex(std::complex<double> value) {
  tag(ValueTag::complex);
  writer_(value.real(), value.imag());
}

void ValueWriter::begin(ValueTag kind, const TypeHead& type) {
  tag(kind);
  const auto known = std::ranges::find(types_, &type);
  writer_.varint(known == types_.end() ? 0
                                       : static_cast<std::uint64_t>(known - types_.begin()) + 1);
  if (known != types_.end()) return;
  types_.push_back(&type);
  writer_(type.name, type.fields);
}

void ValueWriter::member(const TypeHead& type, std::string_view name) {
  begin(ValueTag::member, type);
  writer_.sized(name.data(), name.size());
}

void ValueWriter::element_type(const TensorHead& head) {
  if (head.numpy_type.empty()) return writer_.byte(static_cast<std::uint8_t>(head.dtype));
  writer_.byte(kNumpyType);
  writer_(head.numpy_type);
}

void ValueWriter::scalar(const TensorHead& head, std::span<const std::byte> value) {
  tag(ValueTag::scalar);
  element_type(head);
  writer_.raw(value.data(), value.size());
}

void ValueWriter::tensor(const TensorHead& head, bool is_inline) {
  tag(head.device ? ValueTag::device_tensor : ValueTag::tensor);
  if (head.device) writer_.varint(*head.device);
  writer_(head.framework, is_inline);
  element_type(head);
  writer_(head.shape);
}

ValueReader::ValueReader(const Payload& payload, const Limits& limits)
    : parts_(payload.parts), max_depth_(limits.max_depth), reader_(payload.body) {
  if (payload.body.size() > limits.max_body) fail("a value larger than the limit");
  open_.push_back(1);
}

const ValueToken& ValueReader::next() {
  take_place();
  token_ = ValueToken{};
  const std::uint8_t tag = reader_.byte();
  if (tag > static_cast<std::uint8_t>(enum_max(ValueTag{}))) {
    fail("unknown kind of value " + std::to_string(tag));
  }
  token_.tag = static_cast<ValueTag>(tag);
  switch (token_.tag) {
    case ValueTag::none:
    case ValueTag::false_:
    case ValueTag::true_:
      break;
    case ValueTag::integer:
      token_.integer = reader_.zigzag();
      break;
    case ValueTag::real:
    case ValueTag::complex: {
      double real = 0;
      double imaginary = 0;
      reader_(real);
      if (token_.tag == ValueTag::complex) reader_(imaginary);
      token_.number = {real, imaginary};
      break;
    }
    case ValueTag::big_integer:
    case ValueTag::string:
    case ValueTag::bytes:
    case ValueTag::bytearray:
    case ValueTag::pickle:
      read_bytes();
      break;
    case ValueTag::list:
    case ValueTag::tuple:
    case ValueTag::set:
    case ValueTag::frozenset:
    case ValueTag::dict:
      read_container();
      break;
    case ValueTag::record:
    case ValueTag::member:
    case ValueTag::flags:
    case ValueTag::convert:
      read_type();
      break;
    case ValueTag::scalar:
      read_scalar();
      break;
    case ValueTag::tensor:
      read_tensor();
      break;
    case ValueTag::device_tensor:
      read_device_tensor();
      break;
  }
  close_full();
  return token_;
}

void ValueReader::take_place() {
  if (open_.empty()) fail("nothing follows a complete value");
  --open_.back();
  --owed_;
}

void ValueReader::open(std::uint64_t values) {
  // Each announced value needs a byte: a few bytes cannot make the builder allocate for more than
  // the message can hold.
  if (values > reader_.left() || owed_ + values > reader_.left()) {
    fail("more values announced than bytes remain");
  }
  if (open_.size() > max_depth_) {
    fail("values nested deeper than " + std::to_string(max_depth_));
  }
  owed_ += values;
  open_.push_back(values);
}

void ValueReader::close_full() {
  while (!open_.empty() && open_.back() == 0) open_.pop_back();
  if (!open_.empty()) return;
  reader_.expect_end();
  if (next_part_ != parts_.size()) fail("parts that no value refers to");
}

void ValueReader::read_container() {
  token_.size = reader_.count(token_.tag == ValueTag::dict ? 2 : 1);
  open(token_.tag == ValueTag::dict ? 2 * static_cast<std::uint64_t>(token_.size) : token_.size);
}

void ValueReader::read_type() {
  const std::uint64_t number = reader_.varint();
  if (number > types_.size()) fail("a type that was not introduced");
  if (number == 0) {
    TypeHead type;
    reader_(type.name, type.fields);
    if (type.name.size() > kMaxTypeName || type.fields.size() > kMaxFields) {
      fail("a type's name or fields exceed the limit");
    }
    types_.push_back(std::move(type));
  }
  token_.type = number == 0 ? types_.size() - 1 : static_cast<std::size_t>(number - 1);
  switch (token_.tag) {
    case ValueTag::member:
      return read_bytes();
    case ValueTag::record:
      token_.size = types_[token_.type].fields.size();
      return open(token_.size);
    default:
      return open(1);
  }
}

void ValueReader::read_bytes() { take_bytes(reader_.count()); }

void ValueReader::read_element_type() {
  tensor_ = TensorHead{};
  const std::uint8_t number = reader_.byte();
  if (number == kNumpyType) {
    tensor_.numpy_type = reader_.text();
    if (!numpy_item_size(tensor_.numpy_type)) fail("an unknown element type of numpy");
  } else if (number < tensor::kDTypes) {
    tensor_.dtype = static_cast<tensor::DType>(number);
  } else {
    fail("an unknown element type " + std::to_string(number));
  }
}

void ValueReader::read_scalar() {
  read_element_type();
  take_bytes(tensor_.item_size());
}

void ValueReader::read_device_tensor() {
  const std::uint64_t device = reader_.varint();
  if (device >= kMaxDevices) fail("a tensor on the impossible device " + std::to_string(device));
  read_tensor();
  tensor_.device = static_cast<std::uint32_t>(device);
  token_.tag = ValueTag::tensor;
}

void ValueReader::read_tensor() {
  Framework framework{};
  bool is_inline = false;
  reader_(framework, is_inline);
  read_element_type();
  if (tensor_.item_size() == 0) fail("a tensor whose elements have no bytes");
  tensor_.framework = framework;
  const std::size_t dimensions = reader_.count();
  if (dimensions > tensor::kMaxDimensions) fail("a tensor of too many dimensions");
  tensor_.shape.resize(dimensions);
  for (std::int64_t& size : tensor_.shape) reader_(size);
  const auto bytes = tensor::byte_size(tensor_.item_size(), tensor_.shape);
  if (!bytes) fail("a tensor of the impossible shape " + tensor::shape_text(tensor_.shape));
  if (is_inline) return take_bytes(static_cast<std::size_t>(*bytes));
  if (next_part_ == parts_.size()) fail("a tensor whose part is missing");
  if (parts_[next_part_].size() != *bytes) {
    fail("a tensor of " + std::to_string(*bytes) + " bytes whose part has " +
         std::to_string(parts_[next_part_].size()));
  }
  token_.part = next_part_++;
}

}  // namespace moolink::wire
