#pragma once

// Frames: a 32-byte header, an encoded control struct, and the payload bytes that follow it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/enum_names.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/uid.h"
#include "wire/archive.h"
#include "wire/hostile_messages.h"
#include "wire/payload.h"

namespace moolink::wire {

inline constexpr std::uint32_t kMagic = 0x6d6c6e6b;  // "mlnk"
// The versions of the protocol that this code speaks. Two peers speak the newest that both know:
// see docs/compatibility.md.
inline constexpr std::uint32_t kOldestVersion = 1;
inline constexpr std::uint32_t kVersion = 1;
// Bits of Hello::features. Peers use a feature only if both have its bit.
inline constexpr std::uint64_t kStreamsFeature = 1;    // tcp: STREAMS, JOIN, chunks on streams
inline constexpr std::uint64_t kNamesakesFeature = 2;  // answers to namesakes: rpc/messages.h
inline constexpr std::uint64_t kFeatures = kStreamsFeature | kNamesakesFeature;
inline constexpr std::size_t kHeaderBytes = 32;
inline constexpr std::size_t kMaxAddresses = 64;
// Of a greeting's rx_have. Omitted messages are sent again and dropped.
inline constexpr std::size_t kMaxHaveWords = 64;
inline constexpr std::size_t kMaxLaterBytes = 4096;  // of fields that a later version has added
inline constexpr std::size_t kMaxKeys = 8;           // named in a greeting, each with a proof of
inline constexpr std::size_t kProofBytes = 32;       // of this many bytes

enum class FrameType : std::uint8_t {
  hello = 1,
  welcome,
  refuse,
  message,
  chunk,
  want,
  grant,
  done,
  ack,
  ping,
  pong,
  window,
  close,
  streams,
  join,
};
constexpr FrameType enum_max(FrameType) { return FrameType::join; }
inline constexpr auto kFrameTypes = enum_names<FrameType::join>(
    "?", "hello", "welcome", "refuse", "message", "chunk", "want", "grant", "done", "ack", "ping",
    "pong", "window", "close", "streams", "join");

// The wire format, little-endian:
// type u8 | flags u8 | lane u16 | length u32 | seq u64 | ack u64 | control u32 | crc32c u32, the
// last being the checksum of the 28 bytes before it.
struct FrameHeader {
  FrameType type = FrameType::hello;
  std::uint8_t flags = 0;
  std::uint16_t lane = 0;
  std::uint32_t length = 0;   // bytes after the header: control + payload
  std::uint64_t seq = 0;      // message: its number in the session; 0 in other frames
  std::uint64_t ack = 0;      // all messages up to this one are complete at the sender of the frame
  std::uint32_t control = 0;  // bytes of the control struct, the first of `length`

  bool operator==(const FrameHeader&) const = default;
};

std::array<std::byte, kHeaderBytes> encode_header(const FrameHeader& header);
// Throws ErrorCode::wire: a wrong checksum (not a moolink peer, or a damaged stream), an unknown
// type, a frame above limits.max_frame, a control struct longer than the frame.
FrameHeader decode_header(std::span<const std::byte, kHeaderBytes> bytes, const Limits& limits);

// A frame to write; the payload follows the control struct, by reference.
struct Frame {
  FrameHeader header;
  Buffer control;
  std::vector<Buffer> payload;

  std::size_t bytes() const { return kHeaderBytes + header.length; }
};

// A received frame: `bytes` is control + payload; for a chunk it is the control struct only,
// because the transport has put the payload in place.
struct ReceivedFrame {
  FrameHeader header;
  Buffer bytes;

  Buffer control() const { return bytes.slice(0, header.control); }
  Buffer payload() const { return bytes.slice(header.control, bytes.size() - header.control); }
};

// Sets type, length and control; lane, seq and ack are the session's. Throws ErrorCode::wire when
// the frame would not fit the header's 32-bit length.
Frame make_frame(FrameType type, Buffer control, std::vector<Buffer> payload = {});

template <class Control>
Frame make_frame(FrameType type, const Control& control, std::vector<Buffer> payload = {}) {
  return make_frame(type, encode(told(control)), std::move(payload));
}

template <class Control>
Control decode_control(const ReceivedFrame& frame) {
  return decode<Control>(frame.control());
}

// The first frame of each side (hello), and the agreement about a session (welcome). All versions
// have the fields up to the name, so that a refusal can name both versions; a later version may
// add fields at the end.
struct Hello {
  std::uint32_t magic = kMagic;
  std::uint32_t wire_min = kOldestVersion;
  std::uint32_t wire_max = kVersion;
  std::uint64_t features = 0;
  Uid instance;
  std::string name;
  Uid host_key;
  std::uint64_t session = 0;           // 0: none known
  std::uint64_t rx_next = 1;           // every message below it is complete here
  std::vector<std::uint64_t> rx_have;  // complete ones above it: as Ack::bitmap
  std::array<std::byte, 32> nonce{};
  std::vector<std::string> keys;  // that the sender can prove; none: it is insecure
  std::vector<std::byte> proof;   // over both greetings, one for each proven key
  std::uint64_t max_frame = 0;
  std::vector<std::string> addresses;  // where this peer listens
  Rest later{};

  auto fields() {
    return std::tie(magic, wire_min, wire_max, features, instance, name, host_key, session, rx_next,
                    rx_have, nonce, keys, proof, max_frame, addresses, later);
  }
};

// The version that two peers speak; none: they have none in common.
std::optional<std::uint32_t> common_version(const Hello& ours, const Hello& theirs);

struct Refuse {
  ErrorCode code = ErrorCode::error;
  std::string text;
  std::string name;  // of the peer that refuses
  Rest later{};

  auto fields() { return std::tie(code, text, name, later); }
};

// Where the bytes of a body or part are: in this frame's payload, in a grant to be requested, in
// chunks to come, in the sender's lent memory, or already in a standing grant.
enum class PartWhere : std::uint8_t { inline_, grant, stream, loan, placed };
constexpr PartWhere enum_max(PartWhere) { return PartWhere::placed; }

struct PartHead {
  std::uint64_t bytes = 0;
  std::uint32_t align = 64;
  PartWhere where = PartWhere::inline_;
  // Its number as a loan, from whichever attempt; placed: the grant; 0: none.
  std::uint64_t id = 0;

  auto fields() { return std::tie(bytes, align, where, id); }
};

// The number of a message's body where parts are numbered (chunks, grants).
inline constexpr std::uint32_t kBodyPart = 0xffffffff;

// Control of a message frame. Lane and seq are in the header; the payload holds the inline bytes,
// body first, then parts in order.
struct MessageHead {
  std::uint64_t lane_prev = 0;  // seq of the lane's message before this one, 0: none
  std::uint8_t kind = 0;        // the rpc layer's
  std::uint64_t ttl_us = 0;     // time left when the frame was written; 0: no deadline
  std::uint32_t attempt = 0;    // of streamed parts: rises when the message moves to another path
  PartHead body;
  std::vector<PartHead> parts;
  std::vector<LentPart> lent;  // by rising part: their receiver may only read them

  auto fields() { return std::tie(lane_prev, kind, ttl_us, attempt, body, parts, lent); }
};

// Control of a chunk: its payload is `bytes` bytes at `offset` of a part.
struct ChunkHead {
  std::uint64_t seq = 0;
  std::uint32_t part = 0;
  std::uint32_t attempt = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  auto fields() { return std::tie(seq, part, attempt, offset, bytes); }
};

struct Want {
  std::uint64_t seq = 0;
  std::uint32_t part = 0;
  std::uint64_t bytes = 0;

  auto fields() { return std::tie(seq, part, bytes); }
};

struct Grant {
  std::uint64_t grant = 0;
  std::uint64_t seq = 0;  // 0: a standing grant, for any part of any message
  std::uint32_t part = 0;
  std::uint64_t bytes = 0;
  std::uint64_t segment = 0;  // its number, or a remote key
  std::uint64_t offset = 0;

  auto fields() { return std::tie(grant, seq, part, bytes, segment, offset); }
};

struct Done {
  std::uint64_t grant = 0;

  auto fields() { return std::tie(grant); }
};

struct Ack {
  std::uint64_t cum = 0;  // all messages up to this one are complete
  // Bit i of word w: message cum + 1 + 64 w + i is complete too. No trailing zero words.
  std::vector<std::uint64_t> bitmap;

  auto fields() { return std::tie(cum, bitmap); }
};

// Body of a message of the session itself (session::kReturnKind): only the lender has this memory
// again.
struct Return {
  std::vector<std::uint64_t> loans;

  auto fields() { return std::tie(loans); }
};

struct Ping {  // and pong: the same number back; no clock value crosses a process
  std::uint64_t number = 0;

  auto fields() { return std::tie(number); }
};

struct Window {
  std::uint64_t bytes = 0;
  std::uint64_t messages = 0;

  auto fields() { return std::tie(bytes, messages); }
};

// A frame between the two ends of a tcp connection: the dialler asks for streams, or the acceptor
// offers them. See docs/design/transport-tcp.md.
struct Streams {
  std::uint64_t connection = 0;  // its number at the acceptor; 0: the dialler asks
  std::uint32_t count = 0;
  std::array<std::byte, 32> key{};  // for the proofs; random

  auto fields() { return std::tie(connection, count, key); }
};

// The first frame of a stream, in each direction.
struct Join {
  std::uint64_t connection = 0;  // the stream's connection, by its number at the acceptor
  std::uint32_t index = 0;
  std::array<std::byte, kProofBytes> proof{};

  auto fields() { return std::tie(connection, index, proof); }
};

struct Close {
  ErrorCode code = ErrorCode::closed;
  std::string text;

  auto fields() { return std::tie(code, text); }
};

// Decode and check; both throw ErrorCode::wire.
Hello decode_hello(const Buffer& control);
MessageHead decode_message_head(const Buffer& control, const Limits& limits);

}  // namespace moolink::wire
