#include "wire/archive.h"

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "base/random.h"
#include "base/uid.h"
#include "check.h"
#include "wire/payload.h"

namespace archive_test {

using namespace moolink;

enum class Colour : std::uint8_t { red, green, blue };
constexpr Colour enum_max(Colour) { return Colour::blue; }

struct Inner {
  std::int32_t number = 0;
  Uid uid;
  bool operator==(const Inner&) const = default;
  auto fields() { return std::tie(number, uid); }
};

struct Outer {
  bool flag = false;
  std::uint8_t small = 0;
  std::uint16_t medium = 0;
  std::uint64_t large = 0;
  std::int64_t negative = 0;
  double real = 0;
  Colour colour = Colour::red;
  std::string text;
  std::vector<std::string> texts;
  std::vector<std::uint64_t> numbers;
  std::vector<std::byte> raw;
  std::optional<Inner> inner;
  std::optional<Inner> absent;
  std::map<std::string, std::int64_t> counters;
  std::pair<std::uint32_t, std::string> pair;
  std::array<std::uint16_t, 3> triple{};
  std::variant<Colour, Inner> either;
  Duration left{};
  bool operator==(const Outer&) const = default;
  auto fields() {
    return std::tie(flag, small, medium, large, negative, real, colour, text, texts, numbers, raw,
                    inner, absent, counters, pair, triple, either, left);
  }
};

Outer example() {
  Outer outer;
  outer.flag = true;
  outer.small = 255;
  outer.medium = 65535;
  outer.large = std::numeric_limits<std::uint64_t>::max();
  outer.negative = std::numeric_limits<std::int64_t>::min();
  outer.real = -0.1;
  outer.colour = Colour::blue;
  outer.text = std::string("a\0b", 3);
  outer.texts = {"", "one", "two"};
  outer.numbers = {0, 127, 128, 1ULL << 63};
  outer.raw = {std::byte{1}, std::byte{2}};
  outer.inner = Inner{-7, {1, 2}};
  outer.counters = {{"episodes", -3}, {"steps", 1'000'000}};
  outer.pair = {9, "nine"};
  outer.triple = {1, 2, 3};
  outer.either = Inner{5, {}};
  outer.left = seconds(3);
  return outer;
}

std::vector<std::byte> copy_of(const Buffer& buffer) {
  return {buffer.data(), buffer.data() + buffer.size()};
}

TEST("utf8: well-formed texts, and all ways to be ill-formed") {
  for (const char* good :
       {"", "a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xed\x9f\xbf"}) {
    CHECK(wire::is_utf8(good));
  }
  for (const char* bad :
       {"\xff", "\x80", "\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
        "\xf0\x80\x80\x80", "a\xe2\x82", "\xc3(", "\xf5\x80\x80\x80"}) {
    CHECK(!wire::is_utf8(bad));
  }
}

TEST("archive: a struct of every kind of member comes back") {
  CHECK(wire::decode<Outer>(wire::encode(example())) == example());
  CHECK(wire::decode<Outer>(wire::encode(Outer{})) == Outer{});
}

TEST("archive: integers use the bytes their value needs") {
  CHECK_EQ(wire::encode(std::uint64_t{127}).size(), 1U);
  CHECK_EQ(wire::encode(std::uint64_t{128}).size(), 2U);
  CHECK_EQ(wire::encode(std::int64_t{-64}).size(), 1U);
  CHECK_EQ(wire::encode(std::numeric_limits<std::uint64_t>::max()).size(), 10U);
}

TEST("archive: every truncation is refused") {
  const std::vector<std::byte> bytes = copy_of(wire::encode(example()));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    CHECK_THROWS(wire::decode<Outer>(std::span(bytes).first(size)), ErrorCode::wire);
  }
}

TEST("archive: bytes left over are refused") {
  std::vector<std::byte> bytes = copy_of(wire::encode(example()));
  bytes.push_back(std::byte{0});
  CHECK_THROWS(wire::decode<Outer>(std::span<const std::byte>(bytes)), ErrorCode::wire);
}

TEST("archive: values outside their type are refused") {
  const auto number = wire::encode(std::uint64_t{65536});
  CHECK_THROWS(wire::decode<std::uint16_t>(number), ErrorCode::wire);
  CHECK_THROWS(wire::decode<Colour>(wire::encode(std::uint64_t{3})), ErrorCode::wire);
  CHECK_THROWS(wire::decode<bool>(wire::encode(std::uint8_t{2})), ErrorCode::wire);
  CHECK_THROWS(wire::decode<std::int8_t>(wire::encode(std::int64_t{1000})), ErrorCode::wire);
  const std::vector<std::byte> endless(11, std::byte{0xff});
  CHECK_THROWS(wire::decode<std::uint64_t>(std::span<const std::byte>(endless)), ErrorCode::wire);
}

TEST("archive: a huge count is refused before anything is allocated") {
  const auto count = wire::encode(std::uint64_t{1} << 60);
  CHECK_THROWS(wire::decode<std::vector<std::string>>(count), ErrorCode::wire);
  CHECK_THROWS(wire::decode<std::string>(count), ErrorCode::wire);
  CHECK_THROWS((wire::decode<std::map<std::string, std::int64_t>>(count)), ErrorCode::wire);
}

TEST("archive: a text that is not UTF-8 is refused, so that nobody has to show it") {
  const auto broken = wire::encode(std::string("peer\xff"));
  CHECK_THROWS(wire::decode<std::string>(broken), ErrorCode::wire);
}

TEST("archive: a map's keys must rise") {
  wire::Writer writer;
  writer(std::uint64_t{2}, std::string("b"), std::int64_t{1}, std::string("a"), std::int64_t{2});
  CHECK_THROWS((wire::decode<std::map<std::string, std::int64_t>>(writer.take())), ErrorCode::wire);
}

TEST("archive: buffers are sliced from a buffer and copied from a span") {
  wire::Payload payload;
  payload.body = wire::encode(std::string("body"));
  payload.parts = {wire::encode(std::string("part")), Buffer()};
  const Buffer encoded = wire::encode(payload);
  const auto sliced = wire::decode<wire::Payload>(encoded);
  CHECK(copy_of(sliced.body) == copy_of(payload.body));
  CHECK_EQ(sliced.parts.size(), 2U);
  CHECK(sliced.body.owner() == encoded.owner());
  const auto copied = wire::decode<wire::Payload>(encoded.span());
  CHECK(copy_of(copied.parts[0]) == copy_of(payload.parts[0]));
  CHECK(copied.body.owner() != encoded.owner());
}

TEST("archive: random bytes throw wire errors and nothing else") {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes(random.below(96));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    try {
      (void)wire::decode<Outer>(std::span<const std::byte>(bytes));
    } catch (const Exception& e) {
      CHECK(e.error().code == ErrorCode::wire);
    }
  }
}

}  // namespace archive_test
