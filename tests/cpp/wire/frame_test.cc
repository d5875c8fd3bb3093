#include "wire/frame.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/random.h"
#include "check.h"
#include "wire/crc32c.h"

namespace frame_test {

using namespace moolink;

wire::FrameHeader example() { return {wire::FrameType::chunk, 3, 77, 1000, 1ULL << 40, 12, 100}; }

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST("crc32c: the published check values") {
  CHECK_EQ(wire::crc32c(bytes_of("123456789")), 0xe3069283U);
  CHECK_EQ(wire::crc32c_table(bytes_of("123456789")), 0xe3069283U);
  CHECK_EQ(wire::crc32c(bytes_of(std::string(32, '\0'))), 0x8a9136aaU);  // RFC 3720, B.4
}

TEST("crc32c: both forms agree, and a sum can be continued") {
  Random random(3);
  std::vector<std::byte> bytes(301);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
  const std::span<const std::byte> all(bytes);
  for (std::size_t size = 0; size < all.size(); ++size) {
    CHECK_EQ(wire::crc32c(all.first(size)), wire::crc32c_table(all.first(size)));
    CHECK_EQ(wire::crc32c(all.subspan(size), wire::crc32c(all.first(size))), wire::crc32c(all));
  }
}

TEST("frame: a header comes back") {
  const auto bytes = wire::encode_header(example());
  CHECK(wire::decode_header(bytes, Limits{}) == example());
}

TEST("frame: every flipped bit of a header is noticed") {
  const auto good = wire::encode_header(example());
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    CHECK_THROWS(wire::decode_header(bad, Limits{}), ErrorCode::wire);
  }
}

TEST("frame: headers with right checksums and wrong contents are refused") {
  auto header = example();
  header.length = 64 << 20;
  CHECK_THROWS(wire::decode_header(wire::encode_header(header), Limits{}), ErrorCode::wire);
  header = example();
  header.control = header.length + 1;
  CHECK_THROWS(wire::decode_header(wire::encode_header(header), Limits{}), ErrorCode::wire);
  header = example();
  header.type = static_cast<wire::FrameType>(99);
  CHECK_THROWS(wire::decode_header(wire::encode_header(header), Limits{}), ErrorCode::wire);
}

TEST("frame: make_frame accounts for control and payload") {
  const Buffer payload = wire::encode(std::string(1000, 'x'));
  const wire::Frame frame =
      wire::make_frame(wire::FrameType::chunk, wire::ChunkHead{5, 1, 0, 0, 1000}, {payload});
  CHECK_EQ(frame.header.length, frame.control.size() + payload.size());
  CHECK_EQ(frame.bytes(), wire::kHeaderBytes + frame.header.length);
  const wire::ReceivedFrame received{frame.header, frame.control};
  CHECK_EQ(wire::decode_control<wire::ChunkHead>(received).bytes, 1000U);
  CHECK(received.payload().empty());
}

TEST("frame: a greeting comes back, and a hostile one is refused") {
  wire::Hello hello;
  hello.instance = {1, 2};
  hello.name = "learner-0";
  hello.host_key = {3, 4};
  hello.rx_next = 17;
  hello.rx_have = {1, 1ULL << 63};
  hello.nonce.fill(std::byte{9});
  hello.addresses = {"tcp://127.0.0.1:4431"};
  const auto again = wire::decode_hello(wire::encode(hello));
  CHECK_EQ(again.name, hello.name);
  CHECK(again.instance == hello.instance);
  CHECK(again.rx_have == hello.rx_have);
  CHECK(again.nonce == hello.nonce);
  CHECK(again.addresses == hello.addresses);

  // As long as the greeting allows: later messages can be complete far beyond the window.
  auto wide = hello;
  wide.rx_have.assign(wire::kMaxHaveWords, 1);
  CHECK_EQ(wire::decode_hello(wire::encode(wide)).rx_have.size(), wire::kMaxHaveWords);
  wide.rx_have.push_back(1);
  CHECK_THROWS(wire::decode_hello(wire::encode(wide)), ErrorCode::wire);

  auto bad = hello;
  bad.magic = 1;
  CHECK_THROWS(wire::decode_hello(wire::encode(bad)), ErrorCode::wire);
  bad = hello;
  bad.name = std::string(2000, 'n');
  CHECK_THROWS(wire::decode_hello(wire::encode(bad)), ErrorCode::wire);
  for (const char* name : {"", "two\nlines"}) {
    bad = hello;
    bad.name = name;
    CHECK_THROWS(wire::decode_hello(wire::encode(bad)), ErrorCode::wire);
  }
  bad = hello;
  bad.addresses.resize(100);
  CHECK_THROWS(wire::decode_hello(wire::encode(bad)), ErrorCode::wire);
  bad = hello;
  bad.instance = {};
  CHECK_THROWS(wire::decode_hello(wire::encode(bad)), ErrorCode::wire);
}

TEST("frame: a greeting's unknown fields are kept, up to a limit, and encoded again") {
  wire::Hello hello;
  hello.instance = {1, 2};
  hello.name = "learner-0";
  hello.later.bytes.assign(wire::kMaxLaterBytes, std::byte{0xff});
  const Buffer bytes = wire::encode(hello);
  const Buffer again = wire::encode(wire::decode_hello(bytes));
  CHECK(std::equal(bytes.span().begin(), bytes.span().end(), again.span().begin(),
                   again.span().end()));
  hello.later.bytes.push_back(std::byte{0});
  CHECK_THROWS(wire::decode_hello(wire::encode(hello)), ErrorCode::wire);
}

TEST("frame: of a greeting without a common version, only its beginning is read") {
  wire::Hello hello;
  hello.wire_min = hello.wire_max = wire::kVersion + 1;
  hello.instance = {1, 2};
  hello.name = "learner-0";
  wire::Writer start;
  start(hello.magic, hello.wire_min, hello.wire_max, hello.features, hello.instance, hello.name);
  start(std::string("another layout"));
  const wire::Hello read = wire::decode_hello(start.take());
  CHECK_EQ(read.name, hello.name);
  CHECK(!wire::common_version(wire::Hello{}, read));
}

TEST("frame: two peers speak the newest version that both know") {
  const auto speaks = [](std::uint32_t oldest, std::uint32_t newest) {
    wire::Hello hello;
    hello.wire_min = oldest;
    hello.wire_max = newest;
    return hello;
  };
  CHECK_EQ(*wire::common_version(speaks(1, 2), speaks(2, 3)), 2U);
  CHECK_EQ(*wire::common_version(speaks(2, 5), speaks(1, 3)), 3U);
  CHECK(!wire::common_version(speaks(1, 1), speaks(2, 3)));
  CHECK(!wire::common_version(speaks(4, 5), speaks(2, 3)));
}

TEST("frame: a message's sizes are checked, their sum without overflow") {
  wire::MessageHead head;
  head.body.bytes = 10;
  head.parts.resize(3);
  head.parts[2] = {1U << 20, 64, wire::PartWhere::stream, 0};
  CHECK_EQ(wire::decode_message_head(wire::encode(head), Limits{}).parts[2].bytes, 1U << 20);

  auto bad = head;
  bad.body.bytes = Limits{}.max_body + 1;
  CHECK_THROWS(wire::decode_message_head(wire::encode(bad), Limits{}), ErrorCode::wire);
  bad = head;
  for (auto& part : bad.parts) part.bytes = std::uint64_t{30} << 30;
  CHECK_THROWS(wire::decode_message_head(wire::encode(bad), Limits{}), ErrorCode::wire);
  bad = head;
  for (auto& part : bad.parts) part.bytes = ~std::uint64_t{0};
  CHECK_THROWS(wire::decode_message_head(wire::encode(bad), Limits{}), ErrorCode::wire);
  bad = head;
  bad.parts[0].align = 3;
  CHECK_THROWS(wire::decode_message_head(wire::encode(bad), Limits{}), ErrorCode::wire);
  Limits few;
  few.max_parts = 2;
  CHECK_THROWS(wire::decode_message_head(wire::encode(head), few), ErrorCode::wire);
}

}  // namespace frame_test
