#include "wire/frame.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/names.h"
#include "wire/crc32c.h"

namespace moolink::wire {
namespace {

constexpr std::size_t kCheckedBytes = kHeaderBytes - 4;

// A FrameHeader in memory has the layout of the format; the checksum follows.
static_assert(std::is_trivially_copyable_v<FrameHeader> && offsetof(FrameHeader, type) == 0 &&
              offsetof(FrameHeader, flags) == 1 && offsetof(FrameHeader, lane) == 2 &&
              offsetof(FrameHeader, length) == 4 && offsetof(FrameHeader, seq) == 8 &&
              offsetof(FrameHeader, ack) == 16 &&
              offsetof(FrameHeader, control) + sizeof(FrameHeader::control) == kCheckedBytes);

}  // namespace

std::array<std::byte, kHeaderBytes> encode_header(const FrameHeader& header) {
  std::array<std::byte, kHeaderBytes> bytes{};
  std::memcpy(bytes.data(), &header, kCheckedBytes);
  const std::uint32_t checksum = crc32c(std::span(bytes).first<kCheckedBytes>());
  std::memcpy(bytes.data() + kCheckedBytes, &checksum, sizeof checksum);
  return bytes;
}

FrameHeader decode_header(std::span<const std::byte, kHeaderBytes> bytes, const Limits& limits) {
  FrameHeader header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), kCheckedBytes);
  std::uint32_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + kCheckedBytes, sizeof checksum);
  if (checksum != crc32c(bytes.first<kCheckedBytes>())) {
    fail("wrong checksum of a frame's header (is the other side a moolink peer?)");
  }
  if (const auto type = static_cast<std::uint8_t>(header.type);
      type == 0 || header.type > enum_max(header.type)) {
    fail("unknown frame type " + std::to_string(type));
  }
  if (header.length > limits.max_frame - kHeaderBytes) {
    fail(std::string("a ") + kFrameTypes[header.type] + " frame of " +
         std::to_string(header.length) + " bytes exceeds the limit of " +
         std::to_string(limits.max_frame));
  }
  if (header.control > header.length) fail("a frame's control is longer than the frame");
  return header;
}

Frame make_frame(FrameType type, Buffer control, std::vector<Buffer> payload) {
  std::uint64_t length = control.size();
  for (const Buffer& piece : payload) length += piece.size();
  if (length > std::numeric_limits<std::uint32_t>::max()) {
    throw Exception(ErrorCode::wire, "a frame of " + std::to_string(length) + " bytes");
  }
  Frame frame;
  frame.header.type = type;
  frame.header.length = static_cast<std::uint32_t>(length);
  frame.header.control = static_cast<std::uint32_t>(control.size());
  frame.control = std::move(control);
  frame.payload = std::move(payload);
  return frame;
}

std::optional<std::uint32_t> common_version(const Hello& ours, const Hello& theirs) {
  const std::uint32_t newest = std::min(ours.wire_max, theirs.wire_max);
  if (newest < std::max(ours.wire_min, theirs.wire_min)) return std::nullopt;
  return newest;
}

Hello decode_hello(const Buffer& control) {
  Hello hello;
  Reader start(control);
  start(hello.magic);
  if (hello.magic != kMagic) fail("not a moolink greeting");
  start(hello.wire_min, hello.wire_max, hello.features, hello.instance, hello.name);
  // The rest has another layout where there is no common version, and is not needed to say so.
  if (common_version(Hello{}, hello)) {
    hello = decode<Hello>(control);
    if (hello.later.bytes.size() > kMaxLaterBytes) fail("too many unknown fields in a greeting");
  }
  if (!is_name(hello.name)) fail("a peer's name that is malformed, or exceeds the limit");
  if (hello.addresses.size() > kMaxAddresses) fail("too many addresses in a greeting");
  for (const std::string& address : hello.addresses) {
    if (address.size() > kMaxName) fail("an address exceeds the limit");
  }
  if (hello.rx_have.size() > kMaxHaveWords) fail("a greeting's bitmap exceeds the limit");
  if (hello.keys.size() > kMaxKeys || hello.proof.size() > kMaxKeys * kProofBytes) {
    fail("too many keys or proofs in a greeting");
  }
  for (const std::string& key : hello.keys) {
    if (key.size() > kMaxName + 64) fail("a key's name exceeds the limit");
  }
  if (!hello.instance) fail("a greeting without an instance");
  return hello;
}

MessageHead decode_message_head(const Buffer& control, const Limits& limits) {
  MessageHead head = decode<MessageHead>(control);
  if (head.body.bytes > std::min(limits.max_body, limits.max_message)) {
    fail("a message's body of " + std::to_string(head.body.bytes) + " bytes exceeds the limit of " +
         std::to_string(limits.max_body));
  }
  if (head.parts.size() > limits.max_parts) {
    fail(std::to_string(head.parts.size()) + " parts in a message exceed the limit of " +
         std::to_string(limits.max_parts));
  }
  std::uint64_t total = head.body.bytes;
  for (const PartHead& part : head.parts) {
    if (part.bytes > limits.max_part || part.bytes > limits.max_message - total) {
      fail("a message's parts exceed the limit of " + std::to_string(limits.max_message) +
           " bytes");
    }
    if (!std::has_single_bit(part.align) || part.align > 4096) fail("a part's alignment");
    total += part.bytes;
  }
  std::uint64_t next = 0;
  for (const LentPart& lent : head.lent) {
    if (lent.part < next || lent.part >= head.parts.size()) fail("a lent part that is none");
    next = lent.part + std::uint64_t{1};
  }
  return head;
}

}  // namespace moolink::wire
