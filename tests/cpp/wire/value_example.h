#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "wire/value.h"

namespace moolink::wire::example {

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline Buffer zeros(std::size_t size) {
  HeapAllocator heap;
  const MutableBuffer buffer = heap.allocate(size);
  for (std::byte& byte : buffer.span()) byte = std::byte{0};
  return buffer;
}

// One value with a token of every kind; types must outlive the call.
inline Payload write_everything(const TypeHead& record, const TypeHead& colour) {
  ValueWriter writer{Limits{}};
  writer.begin(ValueTag::list, 21);
  writer.none();
  writer.boolean(true);
  writer.boolean(false);
  writer.integer(-12345);
  writer.bytes(ValueTag::big_integer, bytes_of("0123456789"));
  writer.real(0.5);
  writer.complex({1, -2});
  writer.string("text");
  writer.bytes(ValueTag::bytes, bytes_of("bytes"));
  writer.bytes(ValueTag::bytearray, bytes_of("array"));
  writer.begin(ValueTag::tuple, 1);
  writer.begin(ValueTag::set, 1);
  writer.integer(1);
  writer.begin(ValueTag::frozenset, 0);
  writer.begin(ValueTag::dict, 2);
  writer.string("key");
  writer.begin(ValueTag::list, 0);
  writer.integer(7);
  writer.none();
  writer.begin(ValueTag::record, record);
  writer.integer(1);
  writer.begin(ValueTag::record, record);
  writer.none();
  writer.none();
  writer.member(colour, "red");
  writer.begin(ValueTag::flags, colour);
  writer.integer(3);
  writer.scalar({Framework::numpy, tensor::DType::float32, "", {}}, bytes_of("abcd"));
  writer.inline_tensor({Framework::torch, tensor::DType::int16, "", {2, 2}}, bytes_of("abcdefgh"));
  writer.inline_tensor({Framework::cupy, tensor::DType::int8, "", {3}, 2}, bytes_of("xyz"));
  writer.begin(ValueTag::convert, record);
  writer.part_tensor({Framework::numpy, tensor::DType::uint8, "<U3", {5}});
  writer.bytes(ValueTag::pickle, bytes_of("pickle"));
  Payload payload;
  payload.body = writer.take();
  payload.parts = {zeros(60)};
  return payload;
}

// Walks a value to its end; how many tokens it has. Touches every byte that a token shows.
inline std::size_t walk(const Payload& payload, const Limits& limits, std::uint64_t& checksum) {
  ValueReader reader(payload, limits);
  std::size_t tokens = 0;
  while (!reader.done()) {
    const ValueToken& token = reader.next();
    ++tokens;
    for (const std::byte byte : token.bytes) checksum = checksum * 31 + static_cast<unsigned>(byte);
    checksum += token.size + static_cast<std::uint64_t>(token.tag);
    if (token.part == kNoPart) continue;
    for (const std::byte byte : payload.parts[token.part].span()) {
      checksum = checksum * 31 + static_cast<unsigned>(byte);
    }
  }
  return tokens;
}

}  // namespace moolink::wire::example
