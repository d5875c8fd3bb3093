#include "wire/archive.h"

#include <algorithm>

namespace moolink::wire {

bool is_utf8(std::string_view bytes) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const auto lead = static_cast<std::uint8_t>(bytes[at]);
    const std::size_t length = lead < 0x80   ? 1
                               : lead < 0xc2 ? 0
                               : lead < 0xe0 ? 2
                               : lead < 0xf0 ? 3
                               : lead < 0xf5 ? 4
                                             : 0;
    if (length == 0 || length > bytes.size() - at) return false;
    for (std::size_t i = 1; i < length; ++i) {
      if ((static_cast<std::uint8_t>(bytes[at + i]) & 0xc0) != 0x80) return false;
    }
    if (length > 2) {
      const auto second = static_cast<std::uint8_t>(bytes[at + 1]);
      const bool overlong = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
      const bool surrogate = lead == 0xed && second > 0x9f;
      const bool beyond = lead == 0xf4 && second > 0x8f;
      if (overlong || surrogate || beyond) return false;
    }
    at += length;
  }
  return true;
}

void fail(const std::string& what) {
  throw Exception(ErrorCode::wire, "malformed data from the peer: " + what);
}

Buffer Writer::take() {
  const std::size_t size = std::exchange(size_, 0);
  if (large_ == nullptr) {
    auto owner = std::make_shared_for_overwrite<std::byte[]>(size);
    const std::byte* data = owner.get();
    std::memcpy(owner.get(), small_, size);
    return {std::move(owner), data, size};
  }
  bytes_ = small_;
  capacity_ = kSmall;
  const std::byte* data = large_.get();
  return {std::exchange(large_, nullptr), data, size};
}

void Writer::grow(std::size_t size) {
  const std::size_t capacity = std::max(2 * capacity_, size_ + size);
  auto larger = std::make_shared_for_overwrite<std::byte[]>(capacity);
  std::memcpy(larger.get(), bytes_, size_);
  large_ = std::move(larger);
  bytes_ = large_.get();
  capacity_ = capacity;
}

Buffer Reader::bytes() {
  const std::size_t size = count();
  const std::byte* data = raw(size);
  if (owner_ != nullptr) return {*owner_, data, size};
  auto copy = std::make_shared<const std::vector<std::byte>>(data, data + size);
  const std::byte* copied = copy->data();
  return {std::move(copy), copied, size};
}

std::uint64_t Reader::long_varint() {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    const auto next = static_cast<std::uint64_t>(*raw(1));
    // The tenth byte has room for one bit.
    if (shift == 63 && next > 1) fail("an integer of more than 64 bits");
    value |= (next & 0x7f) << shift;
    if (next < 0x80) return value;
  }
  fail("an integer of more than 64 bits");
}

void Reader::expect_end() const {
  if (left_ != 0) fail(std::to_string(left_) + " bytes left over");
}

void Reader::not_utf8() { throw Exception(ErrorCode::wire, "a text that is not UTF-8"); }

void Reader::truncated(std::uint64_t wanted) const {
  fail(std::to_string(wanted) + " more expected, " + std::to_string(left_) + " bytes remain");
}

void Reader::out_of_range(const char* what, std::uint64_t value) {
  fail(std::string(what) + " out of range: " + std::to_string(value));
}

}  // namespace moolink::wire
