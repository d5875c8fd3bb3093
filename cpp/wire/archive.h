#pragma once

// Encoding of plain structs. A struct names its members once,
//   auto fields() { return std::tie(a, b, c); }
// and is written by Writer and read by Reader. Integers are LEB128 varints (signed ones zigzag),
// floating point is IEEE little-endian, strings and containers carry their count. Nothing is
// self-describing: both sides know the type, and the version in the greeting fixes the layout.
//
// Reading trusts nothing: every count is checked against the remaining bytes before any allocation,
// enums against their range, and leftover bytes are an error (ErrorCode::wire).

#include <array>
#include <bit>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"

namespace moolink {

// The greatest value of an enum on the wire: a function `enum_max(E)` beside the enum, found by its
// argument.
constexpr ErrorCode enum_max(ErrorCode) { return static_cast<ErrorCode>(kErrorCodes - 1); }
constexpr Ran enum_max(Ran) { return Ran::yes; }

}  // namespace moolink

namespace moolink::wire {

static_assert(std::endian::native == std::endian::little, "moolink runs on little-endian hosts");

[[noreturn]] void fail(const std::string& what);  // throws Exception{ErrorCode::wire}

// Whether the bytes are well-formed UTF-8 (RFC 3629: no surrogates, no overlong forms).
bool is_utf8(std::string_view bytes);

template <class T>
inline constexpr bool kIsByte =
    std::same_as<T, std::byte> || std::same_as<T, std::uint8_t> || std::same_as<T, char>;

template <class T>
concept HasFields = requires(T& value) { value.fields(); };

// The last field of a struct that later versions add to: the bytes after the fields that this
// version knows. It is kept, since a proof may cover the bytes of the whole struct.
struct Rest {
  std::vector<std::byte> bytes;
};

class Writer {
 public:
  Writer() = default;
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  template <class... T>
  void operator()(const T&... values) {
    (write(values), ...);
  }

  void varint(std::uint64_t value) {
    std::byte encoded[10];
    std::size_t size = 0;
    while (value >= 0x80) {
      encoded[size++] = static_cast<std::byte>(value | 0x80);
      value >>= 7;
    }
    encoded[size++] = static_cast<std::byte>(value);
    raw(encoded, size);
  }
  void zigzag(std::int64_t value) {
    varint((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void byte(std::uint8_t value) { *room(1) = static_cast<std::byte>(value); }
  void raw(const void* data, std::size_t size) {
    if (size == 0) return;  // data may be null then
    std::memcpy(room(size), data, size);
  }
  void sized(const void* data, std::size_t size) {
    varint(size);
    raw(data, size);
  }

  std::size_t size() const { return size_; }
  // The bytes written so far as a separate buffer; the writer is empty afterwards.
  Buffer take();

 private:
  template <class T>
  void write(const T& value) {
    if constexpr (std::same_as<T, bool>) {
      byte(value ? 1 : 0);
    } else if constexpr (kIsByte<T> || std::same_as<T, std::int8_t>) {
      byte(static_cast<std::uint8_t>(value));
    } else if constexpr (std::is_enum_v<T>) {
      varint(static_cast<std::uint64_t>(value));
    } else if constexpr (std::unsigned_integral<T>) {
      varint(value);
    } else if constexpr (std::signed_integral<T>) {
      zigzag(value);
    } else if constexpr (std::floating_point<T>) {
      static_assert(sizeof(T) == 4 || sizeof(T) == 8);
      raw(&value, sizeof value);
    } else if constexpr (!std::is_empty_v<T>) {
      // fields() is one function for both directions and therefore not const; Writer only reads.
      static_assert(HasFields<T>, "the type has no fields(), and is no known container");
      std::apply(*this, const_cast<T&>(value).fields());
    }
  }
  void write(const std::string& value) { sized(value.data(), value.size()); }
  void write(const Buffer& value) { sized(value.data(), value.size()); }
  void write(const Rest& rest) { raw(rest.bytes.data(), rest.bytes.size()); }
  template <class R, class P>
  void write(const std::chrono::duration<R, P>& value) {
    zigzag(value.count());
  }
  template <class T, class A>
  void write(const std::vector<T, A>& values) {
    if constexpr (kIsByte<T>) {
      sized(values.data(), values.size());
    } else {
      varint(values.size());
      for (const T& value : values) write(value);
    }
  }
  template <class T, std::size_t N>
  void write(const std::array<T, N>& values) {
    if constexpr (kIsByte<T>) {
      raw(values.data(), N);
    } else {
      for (const T& value : values) write(value);
    }
  }
  template <class A, class B>
  void write(const std::pair<A, B>& value) {
    write(value.first);
    write(value.second);
  }
  template <class T>
  void write(const std::optional<T>& value) {
    write(value.has_value());
    if (value) write(*value);
  }
  template <class K, class V>
  void write(const std::map<K, V>& values) {
    varint(values.size());
    for (const auto& [key, value] : values) {
      write(key);
      write(value);
    }
  }
  template <class... T>
  void write(const std::variant<T...>& value) {
    varint(value.index());
    std::visit([this](const auto& alternative) { write(alternative); }, value);
  }

  // Where the next `size` bytes go; they count as written.
  std::byte* room(std::size_t size) {
    if (size > capacity_ - size_) grow(size);
    std::byte* at = bytes_ + size_;
    size_ += size;
    return at;
  }
  void grow(std::size_t size);

  // Most structs are small: they are written on the stack and copied once, into a buffer of their
  // own size.
  static constexpr std::size_t kSmall = 192;
  std::byte small_[kSmall];  // NOLINT(cppcoreguidelines-pro-type-member-init): written before read
  std::shared_ptr<std::byte[]> large_;
  std::byte* bytes_ = small_;
  std::size_t size_ = 0;
  std::size_t capacity_ = kSmall;
};

class Reader {
 public:
  // Buffers read from a plain span are copies; from a Buffer they are slices that share its owner.
  // NOLINTBEGIN(google-explicit-constructor): either is the argument of decode()
  Reader(std::span<const std::byte> bytes) : at_(bytes.data()), left_(bytes.size()) {}
  Reader(const Buffer& bytes) : Reader(bytes.span()) { owner_ = &bytes.owner(); }
  // NOLINTEND(google-explicit-constructor)

  template <class... T>
  void operator()(T&... values) {
    (read(values), ...);
  }

  std::uint64_t varint() {
    if (left_ != 0 && *at_ < std::byte{0x80}) return static_cast<std::uint64_t>(*raw(1));
    return long_varint();
  }
  std::int64_t zigzag() {
    const std::uint64_t value = varint();
    return static_cast<std::int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  std::uint8_t byte() { return static_cast<std::uint8_t>(*raw(1)); }
  const std::byte* raw(std::size_t size) {
    if (size > left_) truncated(size);
    const std::byte* at = at_;
    at_ += size;
    left_ -= size;
    return at;
  }
  // A count of elements of at least `least` bytes each.
  std::size_t count(std::size_t least = 1) {
    const std::uint64_t value = varint();
    if (value > left_ / least) truncated(value);
    return static_cast<std::size_t>(value);
  }
  std::string_view text() {
    const std::size_t size = count();
    const std::string_view text(reinterpret_cast<const char*>(raw(size)), size);
    if (!is_utf8(text)) not_utf8();
    return text;
  }
  Buffer bytes();

  std::size_t left() const { return left_; }
  void expect_end() const;

 private:
  std::uint64_t long_varint();
  [[noreturn]] void truncated(std::uint64_t wanted) const;
  [[noreturn]] static void not_utf8();
  [[noreturn]] static void out_of_range(const char* what, std::uint64_t value);

  template <class T>
  void read(T& value) {
    if constexpr (std::same_as<T, bool>) {
      const std::uint8_t raw_value = byte();
      if (raw_value > 1) out_of_range("bool", raw_value);
      value = raw_value == 1;
    } else if constexpr (kIsByte<T> || std::same_as<T, std::int8_t>) {
      value = static_cast<T>(byte());
    } else if constexpr (std::is_enum_v<T>) {
      const std::uint64_t number = varint();
      if (number > static_cast<std::uint64_t>(enum_max(T{}))) out_of_range("enum", number);
      value = static_cast<T>(number);
    } else if constexpr (std::unsigned_integral<T>) {
      const std::uint64_t number = varint();
      if (number > std::numeric_limits<T>::max()) out_of_range("unsigned integer", number);
      value = static_cast<T>(number);
    } else if constexpr (std::signed_integral<T>) {
      const std::int64_t number = zigzag();
      if (number < std::numeric_limits<T>::min() || number > std::numeric_limits<T>::max()) {
        out_of_range("integer", static_cast<std::uint64_t>(number));
      }
      value = static_cast<T>(number);
    } else if constexpr (std::floating_point<T>) {
      std::memcpy(&value, raw(sizeof value), sizeof value);
    } else if constexpr (!std::is_empty_v<T>) {
      static_assert(HasFields<T>, "the type has no fields(), and is no known container");
      std::apply(*this, value.fields());
    }
  }
  void read(std::string& value) { value = text(); }
  void read(Buffer& value) { value = bytes(); }
  void read(Rest& rest) {
    const std::size_t size = left_;
    const std::byte* at = raw(size);
    rest.bytes.assign(at, at + size);
  }
  template <class R, class P>
  void read(std::chrono::duration<R, P>& value) {
    value = std::chrono::duration<R, P>(zigzag());
  }
  template <class T, class A>
  void read(std::vector<T, A>& values) {
    const std::size_t size = count();
    values.clear();
    if constexpr (kIsByte<T>) {
      const auto* data = reinterpret_cast<const T*>(raw(size));
      values.assign(data, data + size);
    } else {
      // An element may be larger in memory than its one byte here: grow with the actual elements.
      values.reserve(size < kTrustedCount ? size : kTrustedCount);
      for (std::size_t i = 0; i < size; ++i) {
        T value{};
        read(value);
        values.push_back(std::move(value));
      }
    }
  }
  template <class T, std::size_t N>
  void read(std::array<T, N>& values) {
    if constexpr (kIsByte<T>) {
      if constexpr (N != 0) std::memcpy(values.data(), raw(N), N);
    } else {
      for (T& value : values) read(value);
    }
  }
  template <class A, class B>
  void read(std::pair<A, B>& value) {
    read(value.first);
    read(value.second);
  }
  template <class T>
  void read(std::optional<T>& value) {
    bool present = false;
    read(present);
    value.reset();
    if (present) read(value.emplace());
  }
  template <class K, class V>
  void read(std::map<K, V>& values) {
    const std::size_t size = count(2);
    values.clear();
    for (std::size_t i = 0; i < size; ++i) {
      std::pair<K, V> item{};
      read(item);
      // One encoding for one map: keys rise strictly.
      if (!values.empty() && !(values.rbegin()->first < item.first)) fail("keys out of order");
      values.emplace_hint(values.end(), std::move(item));
    }
  }
  template <class... T>
  void read(std::variant<T...>& value) {
    const std::uint64_t index = varint();
    if (index >= sizeof...(T)) out_of_range("variant", index);
    read_alternative(value, index, std::index_sequence_for<T...>{});
  }
  template <class... T, std::size_t... I>
  void read_alternative(std::variant<T...>& value, std::uint64_t index, std::index_sequence<I...>) {
    (void)((index == I && (read(value.template emplace<I>()), true)) || ...);
  }

  static constexpr std::size_t kTrustedCount = 1024;

  const std::byte* at_;
  std::size_t left_;
  const std::shared_ptr<const void>* owner_ = nullptr;
};

template <class T>
Buffer encode(const T& value) {
  Writer writer;
  writer(value);
  return writer.take();
}

// Of all bytes of a span or a Buffer.
template <class T>
T decode(Reader reader) {
  T value{};
  reader(value);
  reader.expect_end();
  return value;
}

}  // namespace moolink::wire
